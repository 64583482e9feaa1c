"""`kvlift documents memory`: runs the cases, shows a table, writes a JSON file and a plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_ext.documents.memory import WAYS, Case, MemoryRow, compared, measure


def report_memory(tokens: Sequence[int], documents: int, device: str, threads: int, out: Path) -> None:
    """tokens: per document, one pair of cases each. Writes `documents-memory.json` and `.png` into `out`."""
    console = Console()
    cases = [Case(way, length, documents, device=device) for length in tokens for way in WAYS]
    rows = compared([measure(case, threads) for case in track(cases, "steps", console=Console(stderr=True))])
    table = Table(title=f"one training step, {documents} documents, float32, {device}, {threads} threads")
    for column in ("tokens per document", "way", "peak memory, MB", "lower by", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        lower = "" if row.lower is None else f"{row.lower:.0%}"
        table.add_row(str(row.tokens), row.way, f"{row.peak_mb:,.0f}", lower, f"{row.seconds:.1f}")
    console.print(table)
    out.mkdir(parents=True, exist_ok=True)
    about = {"device": device, "threads": threads, "shape": asdict(cases[0].shape)}
    text = json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2)
    (out / "documents-memory.json").write_text(text + "\n")
    _plot(rows, out / "documents-memory.png")


def _plot(rows: Sequence[MemoryRow], path: Path) -> None:
    figure = Figure(figsize=(9.0, 4.0), layout="constrained")
    memory, time = figure.subplots(1, 2)
    for way, marker in zip(WAYS, ("o", "s"), strict=True):
        own = [row for row in rows if row.way == way]
        lengths = [row.tokens for row in own]
        memory.plot(lengths, [row.peak_mb / 1000 for row in own], marker=marker, label=way)
        time.plot(lengths, [row.seconds for row in own], marker=marker, label=way)
    for axes, what in ((memory, "peak memory over the model, GB"), (time, "time of one step, s")):
        axes.set_xlabel("tokens per document")
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"one training step of SemPIC, {rows[0].documents} documents")
    figure.savefig(path, dpi=150)
