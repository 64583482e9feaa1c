"""The plots of a bench, after the paper's figures 9a, 10 and 11. A panel per shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from sglang_ext.offline.bench.rows import PHASES, BenchRow
from sglang_ext.offline.evaluate.style import COLOURS, GREY, save, tidy

HEADLINE_RHO = 0.3
_SPEEDUPS = (0.25, 0.5, 1, 2, 3, 5, 10, 20, 50)  # ticks
_PHASE_COLOURS = dict(zip(PHASES, ("#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e69f00")))


def save_plots(rows: Sequence[BenchRow], folder: Path) -> list[Path]:
    """Writes `speedup.png`, `phases.png` and, where a prompt length has several batches, `throughput.png`, `batch.png`."""
    folder.mkdir(parents=True, exist_ok=True)
    single = [row for row in rows if row.batch == 1]
    figures = {
        "speedup.png": _panels(_budgeted(single), _speedup, lambda shape: f"{shape}\nspeedup against the budget"),
        "phases.png": _panels(_headline(single), _phases, lambda shape: f"{shape}\nthe lift's parts"),
        "throughput.png": _panels(_batched(rows, shortest=True), _throughput, lambda shape: f"{shape}\nthroughput"),
        "batch.png": _panels(_batched(rows), _batches, lambda shape: f"{shape}\nspeedup against the batch"),
    }
    return [save(figure, folder / name) for name, figure in figures.items() if figure is not None]


def _panels(
    rows: Sequence[BenchRow], draw: Callable[[Axes, Sequence[BenchRow]], None], title: Callable[[str], str]
) -> Figure | None:
    by_shape = _grouped(rows, lambda row: row.shape)
    if not by_shape:
        return None
    figure = Figure(figsize=(5.2 * len(by_shape), 4.0), layout="constrained")
    for axes, (shape, own) in zip(figure.subplots(1, len(by_shape), squeeze=False)[0], by_shape.items()):
        draw(axes, own)
        tidy(axes, title(shape), "y")
    return figure


def _speedup(axes: Axes, rows: Sequence[BenchRow]) -> None:
    """Figure 9a: a line per prompt length."""
    for colour, (tokens, own) in zip(COLOURS, _grouped(rows, lambda row: row.tokens).items()):
        own = sorted(own, key=lambda row: row.rho)
        axes.plot([row.rho for row in own], [row.speedup for row in own], "o-", color=colour, label=f"{tokens:,}")
    _native_line(axes)
    axes.set(xlabel="recompute budget ρ", ylabel="native time / lift time")
    axes.set_xticks(sorted({row.rho for row in rows}))
    axes.set_yscale("log")  # at a budget of 0 the lift is ten times as fast as at the others
    speedups = [1.0, *(row.speedup for row in rows)]
    axes.set_yticks([tick for tick in _SPEEDUPS if 0.5 * min(speedups) <= tick <= 1.5 * max(speedups)])
    _plain(axes.yaxis)
    axes.legend(title="prompt tokens", fontsize=8, title_fontsize=8, frameon=False)


def _phases(axes: Axes, rows: Sequence[BenchRow]) -> None:
    """Figure 10: the parts of the lift relative to native prefill, one bar per prompt length."""
    rows = sorted(rows, key=lambda row: row.tokens)
    places = range(len(rows))
    bottoms = [0.0] * len(rows)
    for phase in PHASES:
        heights = [row.phases_ms.get(phase, 0.0) / row.native_ms for row in rows]
        axes.bar(places, heights, 0.6, bottoms, color=_PHASE_COLOURS[phase], label=phase)
        bottoms = [one + other for one, other in zip(bottoms, heights)]
    rest = [max(0.0, row.lift_ms / row.native_ms - sofar) for row, sofar in zip(rows, bottoms)]
    axes.bar(places, rest, 0.6, bottoms, color="#bbbbbb", label="other")
    for place, row in zip(places, rows):
        top = row.lift_ms / row.native_ms
        axes.annotate(f"{row.speedup:.2f}x", (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    _native_line(axes)
    axes.set_xticks(places, [f"{row.tokens:,}" for row in rows])
    axes.set(xlabel=f"prompt tokens (ρ = {rows[0].rho:g})", ylabel="time / native prefill's")
    axes.set_xlim(-0.6, max(len(rows), 2) - 0.4)
    axes.set_ylim(0, max(1.35, *(row.lift_ms / row.native_ms + 0.35 for row in rows)))
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper center", columnspacing=1.0, handlelength=1.2)


def _throughput(axes: Axes, rows: Sequence[BenchRow]) -> None:
    """Figure 11a: prompt tokens per second of both sides."""
    rows = sorted(rows, key=lambda row: row.batch)
    batches = [row.batch for row in rows]
    for label, colour, style, times in (
        ("native prefill", GREY, "s--", [row.native_ms for row in rows]),
        (f"lift, ρ = {rows[0].rho:g}", COLOURS[0], "o-", [row.lift_ms for row in rows]),
    ):
        axes.plot(
            batches,
            [row.batch * row.tokens / ms * 1e3 for row, ms in zip(rows, times)],
            style,
            color=colour,
            label=label,
        )
    _batch_axis(axes, batches)
    axes.set(ylabel=f"prompt tokens per second (T = {rows[0].tokens:,})")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)


def _batches(axes: Axes, rows: Sequence[BenchRow]) -> None:
    """Figure 11b: speedup against batch, a line per prompt length, its ceiling dashed in the same colour."""
    for colour, (tokens, own) in zip(COLOURS, _grouped(rows, lambda row: row.tokens).items()):
        own = sorted(own, key=lambda row: row.batch)
        axes.plot([row.batch for row in own], [row.speedup for row in own], "o-", color=colour, label=f"{tokens:,}")
        axes.axhline(own[0].ceiling_frontier, color=colour, ls="--", lw=1)
    _native_line(axes)
    _batch_axis(axes, sorted({row.batch for row in rows}))
    axes.set(ylabel=f"native time / lift time (ρ = {rows[0].rho:g})")
    axes.set_ylim(bottom=0)
    axes.legend(
        title="prompt tokens\n(dashed: ceiling)", fontsize=8, title_fontsize=8, frameon=False, loc="lower right"
    )


def _native_line(axes: Axes) -> None:
    axes.axhline(1, color=GREY, ls=":", lw=1)
    axes.annotate("native", (1, 1), (-2, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                  ha="right", fontsize=8, color=GREY)  # fmt: skip


def _batch_axis(axes: Axes, batches: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches)
    _plain(axes.xaxis)
    axes.set_xlabel("prompts per batch")


def _plain(axis: Axis) -> None:
    """Plain numbers at the ticks of a logarithmic axis, none between them."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _headline(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows of the budget nearest to the headline's, per shape."""
    found = []
    for own in _grouped(rows, lambda row: row.shape).values():
        nearest = min((row.rho for row in own), key=lambda rho: abs(rho - HEADLINE_RHO))
        found += [row for row in own if row.rho == nearest]
    return found


def _budgeted(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The shapes that were measured at several budgets: one budget makes no line. All, where none was."""
    groups = _grouped(rows, lambda row: row.shape).values()
    several = [row for own in groups if len({row.rho for row in own}) > 1 for row in own]
    return several or list(rows)


def _batched(rows: Sequence[BenchRow], shortest: bool = False) -> list[BenchRow]:
    """The headline's rows of prompt lengths that were measured in several batches; of the shortest one only."""
    groups = _grouped(_headline(rows), lambda row: (row.shape, row.tokens))
    groups = {key: own for key, own in groups.items() if len({row.batch for row in own}) > 1}
    kept = {shape: min(tokens for other, tokens in groups if other == shape) for shape, _ in groups}
    return [row for (shape, tokens), own in groups.items() if not shortest or tokens == kept[shape] for row in own]


def _grouped(rows: Iterable[BenchRow], key: Callable[[BenchRow], object]) -> dict:
    groups: dict = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return dict(groups)
