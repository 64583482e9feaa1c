"""The report's pictures. Points are measured, bars are the smallest and largest seed, lines are simulated."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from loadtest.predict import Predicted, predict, service_of
from loadtest.run import Run
from loadtest.simulate import Service
from loadtest.summary import Summary, SystemRow

_COLOURS = {
    "large": "#333333",
    "lift-0.2": "#1b9e77",
    "lift-0.3": "#d95f02",
    "lift-0.5": "#7570b3",
    "automatic": "#e7298a",
    "cascade": "#1f78b4",
    "small": "#999933",
}
_MARKERS = {"large": "s", "automatic": "^", "cascade": "D", "small": "v"}
_REST = "queue, HTTP, other"
_PARTS = (
    (_REST, "#cccccc", ()),
    ("export, transfer", "#a6cee3", ("export", "transfer", "gather")),
    ("map", "#1f78b4", ("map",)),
    ("score", "#b2df8a", ("score",)),
    ("write, insert", "#33a02c", ("write", "insert")),
    ("recompute", "#fdbf6f", ("recompute",)),
    ("the lifted request", "#ff7f00", ()),
    ("prefill", "#333333", ()),
)
_LINE_POINTS = 24
_LINE_SEEDS = (0, 1, 2)
_FURTHEST = 2.0  # u up to which the simulated lines go


Which = Literal["median", "p99"]
Lines = Mapping[str, Sequence[tuple[float, Predicted]]]
"""By system: what the simulator says at each u."""


def pictures(run: Run, summary: Summary) -> dict[str, bytes]:
    """PNG by name, of what there are figures for."""
    if not summary.rows:
        return {}
    lines = {name: _simulated(run, service) for name in _systems(summary) if (service := service_of(run, name))}
    made = {
        "ttft.png": _ttft(summary, lines),
        "batch.png": _batch(summary, lines),
        "first_token.png": _split(run, summary),
    }
    return {name: _png(figure) for name, figure in made.items()}


def _ttft(summary: Summary, lines: Lines) -> Figure:
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    panels: tuple[tuple[Axes, str, Which], ...] = ((left, "median", "median"), (right, "99th percentile", "p99"))
    for axes, title, which in panels:
        for system in _systems(summary):
            _measured(axes, [row for row in summary.rows if row.system == system], which)
            _line(axes, lines, system, "p99_s" if which == "p99" else "median_s")
        axes.set_title(f"time to first token, {title}")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _load_axis(axes)
    left.set_ylabel("seconds")
    _name_lines(left, lines)
    _legend(figure, left)
    return figure


def _batch(summary: Summary, lines: Lines) -> Figure:
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for system in _systems(summary):
        rows = [row for row in summary.rows if row.system == system]
        known = [(row.u, row.mean_batch) for row in rows if row.mean_batch is not None]
        if known:
            us, batches = zip(*known)
            axes.plot(us, batches, linestyle="none", label=system, **_style(system))
        _line(axes, lines, system, "mean_batch")
    _name_lines(axes, lines)
    axes.set_title("requests per batch")
    axes.set_ylabel("mean batch")
    axes.set_ylim(bottom=0)
    _load_axis(axes)
    _legend(figure, axes)
    return figure


def _split(run: Run, summary: Summary) -> Figure:
    """Means: of them the parts add up."""
    loads = sorted({row.u for row in summary.rows})
    shown = loads if len(loads) == 1 else [loads[0], loads[-1]]
    figure = Figure(figsize=(5.5 * len(shown), 5), layout="constrained")
    for axes, u in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown):
        rows = [row for row in summary.rows if row.u == u and row.first_token_mean_ms is not None]
        below = [0.0] * len(rows)
        for name, colour, _ in _PARTS:
            heights = [parts_of(run, row).get(name, 0.0) / 1000 for row in rows]
            if any(heights):
                axes.bar([row.system for row in rows], heights, bottom=below, color=colour, label=name, width=0.6)
            below = [low + height for low, height in zip(below, heights)]
        axes.set_title(f"u = {u:g}")
        axes.set_ylabel("mean time to first token, seconds")
        axes.tick_params(axis="x", rotation=30)
        axes.grid(axis="y", alpha=0.3)
    _legend(figure, *figure.axes)
    return figure


def parts_of(run: Run, row: SystemRow) -> dict[str, float]:
    """The mean time to first token of a row in parts, milliseconds: its queue is what no other part explains.

    Of a native prefill, S at the mean batch is the prefill; of a lift that was declined, the whole call, its queue
    included. Where neither phases nor S(b) are known, all is queue.
    """
    total = row.first_token_mean_ms or 0.0
    parts: dict[str, float] = {}
    if row.phases_ms:
        for name, _, phases in _PARTS:
            parts[name] = sum(row.phases_ms.get(phase, 0.0) for phase in phases)
        parts["the lifted request"] = row.phases_ms.get("chat_call", 0.0)
        parts["prefill"] = row.phases_ms.get("native_call", 0.0)
    elif (service := service_of(run, row.system)) is not None and row.mean_batch is not None:
        parts["prefill"] = min(service(row.mean_batch) * 1000, total)
    parts[_REST] = max(total - sum(parts.values()), 0.0)
    return {name: ms for name, ms in parts.items() if ms}


def _measured(axes: Axes, rows: Sequence[SystemRow], which: Which) -> None:
    shown = [row for row in rows if getattr(row, f"ttft_{which}_ms") is not None]
    if not shown:
        return
    values = [getattr(row, f"ttft_{which}_ms") / 1000 for row in shown]
    spreads = [getattr(row, f"ttft_{which}_spread_ms") for row in shown]
    down = [value - (low or 0) / 1000 for value, (low, _) in zip(values, spreads)]
    up = [(high / 1000 - value) if high is not None else 0.0 for value, (_, high) in zip(values, spreads)]
    bars = [[max(one, 0.0) for one in down], [max(one, 0.0) for one in up]]
    system = shown[0].system
    axes.errorbar([r.u for r in shown], values, yerr=bars, linestyle="none", capsize=3, label=system, **_style(system))


def _simulated(run: Run, service: Service) -> list[tuple[float, Predicted]]:
    us = [_FURTHEST * (step + 1) / _LINE_POINTS for step in range(_LINE_POINTS)]
    return [(u, predict(run, service, u * run.mu_target, _LINE_SEEDS)) for u in us]


def _line(axes: Axes, lines: Lines, system: str, figure: Literal["median_s", "p99_s", "mean_batch"]) -> None:
    line = lines.get(system, [])
    values = [getattr(predicted, figure) for _, predicted in line]
    axes.plot([u for u, _ in line], values, color=_style(system)["color"], linewidth=1, alpha=0.7)


def _name_lines(axes: Axes, lines: Lines) -> None:
    """For the legend: what is a line and no point."""
    if lines:
        axes.plot([], [], color="#888888", linewidth=1, label="simulated")


def _systems(summary: Summary) -> list[str]:
    return list(dict.fromkeys(row.system for row in summary.rows))


def _style(system: str) -> dict[str, Any]:
    return {"color": _COLOURS.get(system, "#666666"), "marker": _MARKERS.get(system, "o")}


def _load_axis(axes: Axes) -> None:
    axes.set_xlabel("u: arrival rate / native saturation throughput of the large model")
    axes.set_xlim(0, _FURTHEST)
    axes.axvline(1, color="#bbbbbb", linewidth=1, linestyle="--")
    axes.grid(alpha=0.3)


def _legend(figure: Figure, *axes: Axes) -> None:
    """Once, beside the panels."""
    known: dict[str, Artist] = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels()):
            known.setdefault(label, handle)
    figure.legend(list(known.values()), list(known), loc="outside right upper", frameon=False)


def _png(figure: Figure) -> bytes:
    out = io.BytesIO()
    # Without the version of matplotlib, which it would write: same rows, same bytes.
    figure.savefig(out, format="png", dpi=110, metadata={"Software": None})
    return out.getvalue()
