"""One bench from beginning to end: pairs in turn, rows to the file as they come, table and plots at the end."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from sglang_ext.offline.bench.plots import save_plots
from sglang_ext.offline.bench.prefill import Subject, Sweep, measure
from sglang_ext.offline.bench.report import BenchProgress, show
from sglang_ext.offline.bench.rows import BenchResult, BenchRow, ShapeRecord, write_result
from sglang_ext.offline.load_pair import make_pair
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT


@dataclass(frozen=True)
class PairFolders:
    """A pair on disk."""

    source: Path
    target: Path
    pack: Path

    @classmethod
    def of_shape(cls, shape: str, seed: int = 0) -> PairFolders:
        """Random weights of a shape (load_pair.py), made where they are not there yet."""
        folder = make_pair(shape, seed)
        return cls(folder / "source", folder / "target", folder / "pack")


@dataclass(frozen=True)
class Machine:
    """Where it runs. threads: of the CPU; None leaves torch's own choice."""

    device: str
    threads: int | None

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16 on a GPU; float32 on a CPU, where many have no unit for less."""
        return torch.bfloat16 if self.device.startswith("cuda") else torch.float32


def run(
    pairs: Mapping[str, tuple[PairFolders, Sequence[Sweep]]], machine: Machine, out: Path, plots: Path, console: Console
) -> None:
    """Measures each pair's sweeps and writes `out` after every row and the plots at the end.

    An interrupt ends the bench with what is measured so far: table, file and plots hold the finished cases, and
    the interrupt goes on to the caller.
    """
    if machine.threads is not None:
        torch.set_num_threads(machine.threads)
    rows: list[BenchRow] = []
    shapes: dict[str, ShapeRecord] = {}

    def result() -> BenchResult:
        return BenchResult(
            device=_name(machine.device), threads=torch.get_num_threads(), dtype=str(machine.dtype).split(".")[1],
            torch=torch.__version__, selector=RANK_DISAGREEMENT, shapes=shapes, rows=rows,
        )  # fmt: skip

    try:
        for name, (folders, sweeps) in pairs.items():
            gc.collect()  # the last pair's weights: two large targets do not fit side by side
            console.print(f"loading {name}")
            subject = Subject.load(name, folders.source, folders.target, folders.pack, machine.device, machine.dtype)
            shapes[name] = _record(subject)
            for sweep in sweeps:
                subject.check(sweep)
            with BenchProgress(sum(sweep.operations(subject.costs) for sweep in sweeps)) as progress:
                for sweep in sweeps:
                    for row in measure(subject, sweep, progress.tick):
                        rows.append(row)
                        progress.row(row)
                        write_result(out, result())
            del subject
    finally:
        if rows:
            show(result(), console)
            console.print(f"written: {out}, {', '.join(str(path) for path in save_plots(rows, plots))}")


def _record(subject: Subject) -> ShapeRecord:
    costs = subject.costs
    return ShapeRecord(
        source=_shape(subject.source.model.config), target=_shape(subject.target.model.config),
        body=costs.body, map=costs.map, probe=costs.probe, alpha=costs.alpha,
    )  # fmt: skip


def _shape(config) -> str:
    return (
        f"{config.num_hidden_layers} layers of {config.hidden_size}, {config.num_attention_heads} heads, "
        f"{config.num_key_value_heads} KV heads of {config.head_dim}, MLP {config.intermediate_size}"
    )


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device
