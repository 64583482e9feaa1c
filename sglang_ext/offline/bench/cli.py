"""The commands `kvlift bench make-pair` and `kvlift bench prefill`. Importing this module imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from sglang_ext.offline.bench.prefill import Sweep
    from sglang_ext.offline.bench.run import PairFolders

bench = typer.Typer(help="Measure, on models made for it or on your own.", no_args_is_help=True)

_SHAPE_HELP = "a name, or SOURCE:TARGET:kK:rR (see the error for a wrong one)"


@bench.command("make-pair")
def make_pair(
    shape: Annotated[str, typer.Option(help=_SHAPE_HELP)] = "default",
    seed: Annotated[int, typer.Option(help="of the weights and maps")] = 0,
) -> None:
    """Write two models with random weights and a bench-only pack of random maps, once; prints their folder."""
    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline import load_pair

    try:
        folder = load_pair.make_pair(shape, seed)
    except KVLiftError as error:
        _fail(error)
    typer.echo(folder)


@bench.command("prefill")
def prefill(
    preset: Annotated[Optional[str], typer.Option(help="two-cores or gpu, instead of a grid")] = None,
    shape: Annotated[Optional[list[str]], typer.Option(help=f"random weights: {_SHAPE_HELP}; repeatable")] = None,
    source: Annotated[Optional[Path], typer.Option(help="source model's folder, instead of a shape")] = None,
    target: Annotated[Optional[Path], typer.Option(help="target model's folder")] = None,
    pack: Annotated[Optional[Path], typer.Option(help="pack from that source to that target")] = None,
    tokens: Annotated[str, typer.Option(help="prompt lengths T")] = "149,512,1024,2048,4096,8192",
    batch: Annotated[str, typer.Option(help="prompts per operation")] = "1",
    rho: Annotated[str, typer.Option(help="recompute budgets")] = "0,0.2,0.3,0.5",
    rounds: Annotated[int, typer.Option(min=1, help="each times every side once; medians are reported")] = 3,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    threads: Annotated[Optional[int], typer.Option(min=1, help="of the CPU; by default torch's choice")] = None,
    out: Annotated[Path, typer.Option(help="JSON of the rows")] = Path("results/bench.json"),
    plots: Annotated[Path, typer.Option(help="folder for the plots")] = Path("results/bench"),
) -> None:
    """Time native prefill and the lift in turn; print phases, ratio and the share of equation 11's ceiling.

    An interrupt (Ctrl-C) keeps what is measured by then.
    """
    from rich.console import Console

    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.bench.prefill import Sweep
    from sglang_ext.offline.bench.presets import preset_named
    from sglang_ext.offline.bench.run import Machine, PairFolders, run

    own = (source, target, pack)
    if (preset is not None) + bool(shape) + any(own) > 1 or any(own) and not all(own):
        raise typer.BadParameter("give one of: --preset; --shape; --source, --target and --pack together")
    grid = {"tokens": _numbers(int, tokens), "batches": _numbers(int, batch), "rhos": _numbers(float, rho)}
    pairs: dict[str, tuple[PairFolders, tuple[Sweep, ...]]]
    try:
        if preset is not None:
            pairs = {name: (PairFolders.of_shape(name), sweeps) for name, sweeps in preset_named(preset).items()}
        elif source and target and pack:
            pairs = {target.name: (PairFolders(source, target, pack), (Sweep(rounds=rounds, **grid),))}
        else:
            sweeps = (Sweep(rounds=rounds, **grid),)
            pairs = {name: (PairFolders.of_shape(name), sweeps) for name in shape or ["default"]}
        run(pairs, Machine(device, threads), out, plots, Console())
    except KVLiftError as error:
        _fail(error)
    except KeyboardInterrupt as stop:
        raise typer.Exit(130) from stop


def _numbers(kind: type, text: str) -> tuple:
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: expected numbers with commas between them, as in 149,2048") from error


def _fail(error: Exception) -> None:
    typer.echo(f"kvlift: {error}", err=True)
    raise typer.Exit(1) from error
