"""The bench from beginning to end: rows to the file as they come, a table and a plot at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sglang_ext.documents.bench.child import worker_of
from sglang_ext.documents.bench.measure import Bench, Plan
from sglang_ext.documents.bench.rows import TtftResult, TtftRow, write_result
from sglang_ext.offline.evaluate.style import COLOURS, GREY, save, tidy

_SECONDS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)  # ticks
_SPARE = 1024  # slots of the pool beyond the longest prompt and its documents


def bench_worker(url: str | None, model: Path, plan: Plan, out: Path, console: Console) -> None:
    """Measures the worker at `url`, or one that is started for `model`; writes `out` and a PNG beside it.

    An interrupt keeps what is measured by then, and goes on to the caller.
    """
    rows: list[TtftRow] = []
    slots = 2 * max(plan.lengths) * plan.documents + _SPARE
    log = out.with_suffix(".worker.log")
    running: AbstractContextManager[str] = nullcontext(url) if url else worker_of(model, log, slots)
    if url is None:
        console.print(f"starting a worker for {model.name}; its output goes to {log}")
    with running as address, Bench(address) as bench, Progress(console=console) as progress:
        task = progress.add_task("measuring", total=plan.requests)
        try:
            for length in plan.lengths:
                rows.append(bench.row(plan, length, lambda: progress.advance(task)))
                write_result(out, _result(bench, rows))
        finally:
            if rows:
                progress.stop()
                console.print(_table(rows))
                console.print(f"written: {out}, {save_plot(rows, out.with_suffix('.png'))}")


def save_plot(rows: Sequence[TtftRow], path: Path) -> Path:
    """Time to first token against the length of a document, and what the linked one consists of."""
    figure = Figure(figsize=(10.4, 4.0), layout="constrained")
    left, right = figure.subplots(1, 2)
    _times(left, rows)
    _parts(right, rows)
    return save(figure, path)


def _times(axes: Axes, rows: Sequence[TtftRow]) -> None:
    lengths = [row.length for row in rows]
    for colour, name, values in (
        (GREY, "full prefill", [row.full_ms / 1e3 for row in rows]),
        (COLOURS[0], "documents linked", [row.linked_ms / 1e3 for row in rows]),
    ):
        axes.plot(lengths, values, "o-", color=colour, label=name)
    for row in rows:
        axes.annotate(
            f"{row.ratio:.1f}x", (row.length, row.linked_ms / 1e3), (0, -14), textcoords="offset points", ha="center",
            fontsize=9, color=COLOURS[0],
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    low, high = min(row.linked_ms for row in rows) / 1e3, max(row.full_ms for row in rows) / 1e3
    axes.set_ylim(low / 2.2, high * 1.6)
    axes.set_yticks([tick for tick in _SECONDS if low / 2.2 <= tick <= high * 1.6])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set(xlabel=f"tokens of each of {rows[0].documents} documents", ylabel="time to first token, s")
    axes.legend(frameon=False, fontsize=8.5, loc="upper left")
    tidy(axes, f"{rows[0].computed} inline tokens, over HTTP", "y")


def _parts(axes: Axes, rows: Sequence[TtftRow]) -> None:
    places, bottoms = range(len(rows)), [0.0] * len(rows)
    names = list(rows[0].phases_ms)
    greatest = {name: max(row.phases_ms[name] / row.linked_ms for row in rows) for name in names}
    shown = [name for name in names if greatest[name] >= 0.02]
    parts = {name: [row.phases_ms[name] for row in rows] for name in shown}
    rest = [row.linked_ms - sum(row.phases_ms[name] for name in shown) for row in rows]
    colours = dict(zip(shown, COLOURS, strict=False))
    for name, heights in {**parts, "rest": rest}.items():
        kept = [max(height, 0.0) for height in heights]
        axes.bar(places, kept, 0.6, bottoms, color=colours.get(name, "#bbbbbb"), label=name)
        bottoms = [one + other for one, other in zip(bottoms, kept, strict=True)]
    axes.set_xticks(places, [f"{row.length:,}" for row in rows])
    axes.set_xlim(-0.6, max(len(rows), 2) - 0.4)
    axes.set(xlabel=f"tokens of each of {rows[0].documents} documents", ylabel="ms")
    axes.legend(frameon=False, fontsize=8.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    tidy(axes, "What a linked request's first token takes", "y")


def _table(rows: Sequence[TtftRow]) -> Table:
    title = f"time to first token over HTTP, ms, medians of {rows[0].rounds}: {rows[0].documents} documents"
    table = Table(title=title, box=SIMPLE, pad_edge=False)
    for column in ("length", "prompt", "computed", "full prefill", "linked", "ratio", "compile one"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.length:,}", f"{row.prompt:,}", str(row.computed), _time(row.full_ms, row.full_range_ms),
            _time(row.linked_ms, row.linked_range_ms), f"{row.ratio:.1f}", f"{row.compile_ms:,.0f}",
        )  # fmt: skip
    return table


def _time(middle: float, ends: tuple[float, float]) -> str:
    """The median, and half of the way from the least to the greatest round in per cent of it."""
    return f"{middle:,.0f} ±{50 * (ends[1] - ends[0]) / middle:.0f}%"


def _result(bench: Bench, rows: list[TtftRow]) -> TtftResult:
    told = bench.capabilities
    return TtftResult(
        model=told["model"], model_digest=told["model_digest"], kernels=told["kernels"], method=bench.method, rows=rows
    )
