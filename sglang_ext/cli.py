"""The commands of this package: `kvlift worker`, `calibrate`, `bench`, `doctor`, `demo`.

The router's command line gathers them through entry points, so this module imports nothing heavy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

worker = typer.Typer(help="Serve a model with SGLang and kvlift's plugin.")
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@worker.callback(invoke_without_command=True, context_settings=PASS_ON)
def run(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="model folder, or a hub name")],
    pack: Annotated[Optional[list[Path]], typer.Option(help="pack folder whose target is this model; repeatable")] = None,
    rho: Annotated[float, typer.Option(help="recompute budget where a request names none")] = 0.3,
    acceptance: Annotated[float, typer.Option(help="least recovered share of a pack's acceptance record")] = 0.8,
    allow_bench_pack: Annotated[bool, typer.Option(help="also lift with packs of random weights")] = False,
    workers_on_host: Annotated[int, typer.Option(help="workers that share this machine's cores, without a GPU")] = 2,
) -> None:
    """Every other option goes to SGLang's server as it is."""
    from sglang_ext.worker.launch import run_worker
    from sglang_ext.worker.settings import WorkerSettings

    settings = WorkerSettings(
        packs=tuple(str(folder.resolve()) for folder in pack or ()),
        allow_bench_pack=allow_bench_pack, acceptance_threshold=acceptance, rho=rho,
    )  # fmt: skip
    run_worker(model, context.args, settings, workers_on_host)
