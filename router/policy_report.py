"""What a person sees of a fitted threshold: a table, the JSON, and the cost-quality curve as a plot."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from policies.calibrate import Calibration, Goal, Point

_ROWS = 11  # of the curve, in the table
_SIZE_INCHES = (7.5, 5.0)
_BLUE, _ORANGE, _GREY = "#1f5fa8", "#c8540a", "#777777"


def show(found: Calibration, console: Console) -> None:
    """Prints the threshold, the figures beside it, and some points of the curve."""
    console.print(_summary(found))
    console.print(_curve(found))


def write(found: Calibration, out: Path) -> tuple[Path, Path]:
    """Writes the JSON to `out` and the plot beside it; the folder is made. Returns both paths."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"escalates": escalates(found), **asdict(found)}, indent=2) + "\n", encoding="utf-8")
    picture = out.with_suffix(".png")
    _plot(found, picture)
    return out, picture


def escalates(found: Calibration) -> str:
    """The rule that the threshold belongs to."""
    return "score < threshold" if found.higher == "sure" else "score > threshold"


def _summary(found: Calibration) -> Table:
    chosen = found.chosen
    table = Table(title=f"Threshold for {_goal(found.goal)}, from {found.requests} outcomes", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("threshold", repr(chosen.threshold))  # whole: rounded, it could escalate others
    table.add_row("escalates where", escalates(found))
    table.add_row("escalation rate", f"{chosen.rate:.2%}")
    table.add_row("right", f"{chosen.quality:.2%}")
    table.add_row("cost, large calls per request", f"{chosen.cost:.3f}")
    table.add_section()
    table.add_row("right, small model alone", f"{found.small_quality:.2%}")
    table.add_row("right, large model alone", f"{found.large_quality:.2%}")
    table.add_row("area (0.5: mixed by lot)", f"{found.area:.3f}")
    table.add_row("area, best possible", f"{found.best_area:.3f}")
    table.add_row(f"break-even rate at a cost ratio of {found.cost_ratio:g}", f"{found.break_even_rate:.2%}")
    return table


def _curve(found: Calibration) -> Table:
    table = Table("threshold", "escalated", "right", "cost", title="Cost-quality curve")
    for column in table.columns:
        column.justify = "right"
    for point in _thinned(found.curve):
        style = "bold" if point == found.chosen else None
        cells = f"{point.threshold:.6g}", f"{point.rate:.1%}", f"{point.quality:.1%}", f"{point.cost:.3f}"
        table.add_row(*cells, style=style)
    return table


def _thinned(curve: tuple[Point, ...]) -> list[Point]:
    """The points nearest to evenly spread rates, each once."""
    nearest = [min(curve, key=lambda point: abs(point.rate - step / (_ROWS - 1))) for step in range(_ROWS)]
    return list(dict.fromkeys(nearest))


def _goal(goal: Goal) -> str:
    if goal.rate is not None:
        return f"a rate of {goal.rate:.1%}"
    if goal.quality is not None:
        return f"{goal.quality:.1%} right"
    return "the best quality up to break-even"


def _plot(found: Calibration, path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    rates = [point.rate for point in found.curve]
    axes.plot(
        rates,
        [point.quality for point in found.curve],
        color=_BLUE,
        label=f"this score (area {found.area:.3f})",
    )
    gain = found.large_quality - found.small_quality
    axes.plot(
        [0, 1],
        [found.small_quality, found.large_quality],
        color=_GREY,
        linestyle="--",
        label="mixed by lot (area 0.5)",
    )
    axes.plot(
        found.chosen.rate,
        found.chosen.quality,
        "o",
        color=_ORANGE,
        markersize=8,
        label=f"chosen: {found.chosen.rate:.1%} escalated, {found.chosen.quality:.1%} right",
    )
    axes.axvline(
        found.break_even_rate,
        color=_GREY,
        linestyle=":",
        label=f"break-even at {found.break_even_rate:.0%}: beyond it, large alone is cheaper",
    )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(min(found.small_quality, *(p.quality for p in found.curve)) - 0.05 * gain, None)
    axes.set_xlabel("requests escalated to the large model (%)")
    axes.set_ylabel("requests answered right (%)")
    axes.set_title(f"Cost and quality of the cascade, {found.requests} outcomes")
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
