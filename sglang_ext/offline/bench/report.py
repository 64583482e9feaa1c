"""What a person sees of a bench: progress while it runs, a table when it is done or stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from sglang_ext.offline.bench.rows import PHASES, BenchResult, BenchRow

_MEMORY_S = 3600  # the estimate is made from an hour's rounds: they differ in length by a factor of a thousand

_WIDTH = 124  # of a row of the table with times in the hundred thousands


class BenchProgress:
    """A bar over the floating-point operations of the timed calls, with an estimate. A context manager."""

    def __init__(self, operations: float) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left:"),
            TimeRemainingColumn(), console=Console(stderr=True), speed_estimate_period=_MEMORY_S,
        )  # fmt: skip
        self._task = self._bar.add_task("bench", total=operations)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bar.stop()

    def tick(self, operations: float) -> None:
        self._bar.advance(self._task, operations)

    def row(self, row: BenchRow) -> None:
        self._bar.console.print(
            f"{row.shape}  T = {row.tokens:,}  batch {row.batch}  ρ = {row.rho:g}:  native {row.native_ms:,.0f} ms, "
            f"lift {row.lift_ms:,.0f} ms, {row.speedup:.2f}x"
        )


def show(result: BenchResult, console: Console) -> None:
    """Prints what was measured: a table per shape, widened to what its columns need."""
    console.width = max(console.width, _WIDTH)
    machine = f"{result.device}, {result.threads} threads, {result.dtype}"
    for name, one in result.shapes.items():
        table = Table(title=f"{name}: native prefill and lift in ms, medians; {machine}", box=SIMPLE, pad_edge=False)
        for column in ("T", "batch", "ρ", "native", "lift", *PHASES, "speedup", "dense", "frontier", "share"):
            table.add_column(column, justify="right", no_wrap=True)
        for row in result.rows:
            if row.shape == name:
                table.add_row(*_cells(row))
        console.print(table)
        console.print(
            f"{one.source} -> {one.target}\nbody {one.body / 1e6:,.0f}M parameters, map {one.map / one.body:.1%} of it, "
            f"score {one.probe / one.body:.2%}; dense, frontier: equation 11's ceilings; share: of the frontier one",
            highlight=False,
        )


def _cells(row: BenchRow) -> Sequence[str]:
    return (
        f"{row.tokens:,}", str(row.batch), f"{row.rho:g}",
        _time(row.native_ms, row.native_range_ms), _time(row.lift_ms, row.lift_range_ms),
        *(f"{row.phases_ms.get(phase, 0.0):,.0f}" for phase in PHASES),
        f"{row.speedup:.2f}", f"{row.ceiling_dense:.2f}", f"{row.ceiling_frontier:.2f}", f"{row.share_of_ceiling:.0%}",
    )  # fmt: skip


def _time(middle: float, ends: tuple[float, float]) -> str:
    """The median, and half of the way from the least to the greatest round in per cent of it."""
    return f"{middle:,.0f} ±{50 * (ends[1] - ends[0]) / middle:.0f}%"
