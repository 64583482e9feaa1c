"""The commands of this package: `kvlift worker`, `calibrate`, `bench make-pair`, `doctor`.

The router's command line gathers them through entry points, so this module imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

worker = typer.Typer(help="Serve a model with SGLang and kvlift's plugin.")
bench = typer.Typer(help="Measure, on models made for it.", no_args_is_help=True)


@worker.callback(
    invoke_without_command=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run_worker(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="model folder, or a hub name")],
    pack: Annotated[Optional[list[Path]], typer.Option(help="pack whose target is this model; repeatable")] = None,
    rho: Annotated[float, typer.Option(min=0, max=1, help="recompute budget where a request names none")] = 0.3,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="least recovered share of a pack's record")] = 0.8,
    allow_bench_pack: Annotated[bool, typer.Option(help="also lift with packs of random weights")] = False,
    workers_on_host: Annotated[int, typer.Option(min=1, help="workers that share the cores, without a GPU")] = 2,
) -> None:
    """Serve a model with SGLang and kvlift's plugin. Every other option goes to SGLang's server as it is."""
    from sglang_ext.errors import KVLiftError
    from sglang_ext.worker import launch
    from sglang_ext.worker.settings import WorkerSettings

    settings = WorkerSettings(
        packs=tuple(str(folder.resolve()) for folder in pack or ()),
        allow_bench_pack=allow_bench_pack, acceptance_threshold=acceptance, rho=rho,
    )  # fmt: skip
    try:
        launch.run_worker(model, context.args, settings, workers_on_host)
    except KVLiftError as error:
        _fail(error)


def doctor(model: Annotated[Optional[str], typer.Option(help="also check this model folder")] = None) -> None:
    """Check whether this machine can run workers: the same checks that a worker makes at start."""
    from rich.console import Console

    from sglang_ext.worker import checks, launch
    from sglang_ext.worker.platform import is_stand_in
    from sglang_ext.worker.settings import WorkerSettings

    on_cpu = launch.prepare_environment(workers_on_host=2)
    found = launch.process_checks(WorkerSettings())
    found.append(checks.Check("engine", True, "CPU, torch-native attention" if on_cpu else "CUDA"))
    if on_cpu:
        found.append(checks.Check("sgl_kernel", True, "kvlift's stand-in" if is_stand_in() else "the installed wheel"))
    if model is not None:
        found += checks.model_checks(model)
    console = Console()
    for check in found:
        console.print(f"[{'green' if check.ok else 'red'}]{'ok  ' if check.ok else 'FAIL'}[/] {check.name}: {check.detail}")
    if not all(check.ok for check in found):
        raise typer.Exit(1)


def calibrate(
    source: Annotated[str, typer.Option(help="source model: a folder or a hub name")],
    target: Annotated[str, typer.Option(help="target model: a folder or a hub name")],
    data: Annotated[str, typer.Option(help="JSON lines of messages or text, or family:N")],
    out: Annotated[Path, typer.Option(help="folder for the pack")],
    name: Annotated[Optional[str], typer.Option(help="the pack's name; by default the folder's")] = None,
    k: Annotated[int, typer.Option(min=1, help="source layers per target layer and side")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="rank r of the score's basis")] = 128,
    ridge: Annotated[float, typer.Option(min=0, help="lambda of equation 1")] = 0.01,
    tokens: Annotated[int, typer.Option(min=1, help="calibration tokens, after the stride")] = 128_000,
    stride: Annotated[int, typer.Option(min=1, help="take each n-th position")] = 1,
    seed: Annotated[int, typer.Option(help="of the offsets of the stride")] = 0,
    dtype: Annotated[str, typer.Option(help="of the map: float32 or bfloat16")] = "float32",
    rho: Annotated[float, typer.Option(min=0, max=1, help="budget of the acceptance record")] = 0.3,
    device: Annotated[str, typer.Option(help="where the models run")] = "cpu",
) -> None:
    """Fit a pack from one model to another, and measure it on held-out prompts."""
    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.calibrate import Settings
    from sglang_ext.offline.report import calibrate_and_report

    settings = Settings(
        name=name or out.name, k=k, rank=rank, ridge=ridge, tokens=tokens, stride=stride, seed=seed, dtype=dtype, rho=rho
    )
    try:
        calibrate_and_report(source, target, data, out, settings, device)
    except KVLiftError as error:
        _fail(error)


@bench.command("make-pair")
def make_pair(
    shape: Annotated[str, typer.Option(help="a name, or SOURCE:TARGET:kK:rR (see the error for a wrong one)")] = "default",
    seed: Annotated[int, typer.Option(help="of the weights")] = 0,
) -> None:
    """Write two models with random weights and a bench-only pack, once; prints their folder."""
    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline import load_pair
    from sglang_ext.offline.report import RichProgress

    try:
        with RichProgress() as progress:
            folder = load_pair.make_pair(shape, seed, progress)
    except KVLiftError as error:
        _fail(error)
    typer.echo(folder)


@bench.callback()
def _bench() -> None:
    """Measure, on models made for it."""


def _fail(error: Exception) -> None:
    typer.echo(f"kvlift: {error}", err=True)
    raise typer.Exit(1) from error
