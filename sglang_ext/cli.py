"""The commands of this package: `kvlift worker`, `calibrate`, `doctor`.

The router's command line gathers them through entry points, so this module imports nothing heavy.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal, Optional

import typer



MapDtype = Literal["float32", "bfloat16"]
KVTransport = Literal["shm", "mooncake", "auto"]
KVProtocol = Literal["tcp", "rdma"]
DocumentPolicy = Literal["auto", "explicit", "off"]


class Structure(str, Enum):
    """Structures of maps, as words on the command line."""

    full = "full"
    head = "head"


worker = typer.Typer(help="Serve a model with SGLang and kvlift's plugin.")


@worker.callback(
    invoke_without_command=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run_worker(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="model folder, or a hub name")],
    pack: Annotated[Optional[list[Path]], typer.Option(help="pack whose target is this model; repeatable")] = None,
    rho: Annotated[float, typer.Option(min=0, max=1, help="recompute budget where a request names none")] = 0.3,
    recompute_tokens: Annotated[
        Optional[int],
        typer.Option(min=1, help="positions that lifts recompute in a step while others decode; unset: SGLang's chunk"),
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="least recovered share of a pack's record")] = 0.8,
    allow_bench_pack: Annotated[bool, typer.Option(help="also lift with packs of random weights")] = False,
    kernels: Annotated[bool, typer.Option("--kernels/--no-kernels", help="Triton kernels, on a CUDA device")] = True,
    workers_on_host: Annotated[int, typer.Option(min=1, help="workers that share the cores, without a GPU")] = 2,
    cpu_overlap: Annotated[
        bool, typer.Option("--cpu-overlap", help="without a GPU too, compute a batch before the last one is answered")
    ] = False,
    kv_transport: Annotated[
        KVTransport, typer.Option(help="blocks go through shared memory, Mooncake, or what the other worker can")
    ] = "shm",
    kv_host: Annotated[Optional[str], typer.Option(help="Mooncake: where other workers reach this one")] = None,
    kv_protocol: Annotated[KVProtocol, typer.Option(help="Mooncake: of its transfers")] = "tcp",
    kv_device: Annotated[str, typer.Option(help="Mooncake: RDMA devices, with commas; empty: all")] = "",
    kv_buffer_bytes: Annotated[int, typer.Option(min=1, help="Mooncake: buffer for blocks on their way")] = 1 << 30,
    documents: Annotated[
        DocumentPolicy, typer.Option(help="in chats: compiled on first sight, only by POST /v1/documents, or refused")
    ] = "auto",
    documents_adapter: Annotated[
        Optional[list[Path]], typer.Option(help="what documents are compiled by (kvlift documents train); repeatable")
    ] = None,
    documents_bytes: Annotated[int, typer.Option(min=0, help="memory for compiled documents")] = 1 << 30,
    documents_store: Annotated[
        Optional[str], typer.Option(help="keeps documents beyond memory: a folder, or mooncake://MASTER:PORT")
    ] = None,
    documents_store_bytes: Annotated[
        Optional[int],
        typer.Option(min=1, help="size of that folder, 16 GiB if unset, or memory given to that store, 1 GiB if unset"),
    ] = None,
) -> None:
    """Serve a model with SGLang and kvlift's plugin. Every other option goes to SGLang's server as it is."""
    from sglang_ext.errors import KVLiftError
    from sglang_ext.worker import launch
    from sglang_ext.worker.settings import WorkerSettings

    settings = WorkerSettings(
        packs=tuple(str(folder.resolve()) for folder in pack or ()),
        allow_bench_pack=allow_bench_pack, acceptance_threshold=acceptance, rho=rho,
        recompute_tokens=recompute_tokens, kernels=kernels, kv_transport=kv_transport, kv_host=kv_host,
        kv_protocol=kv_protocol, kv_device=kv_device, kv_buffer_bytes=kv_buffer_bytes,
        documents=documents, documents_bytes=documents_bytes,
        documents_adapters=tuple(str(folder.resolve()) for folder in documents_adapter or ()),
        documents_store=documents_store,
        documents_store_bytes=documents_store_bytes,
    )  # fmt: skip
    try:
        launch.run_worker(model, context.args, settings, workers_on_host, cpu_overlap)
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
    structure: Annotated[list[Structure], typer.Option(help="of the maps; repeatable")] = [Structure.full],  # noqa: B006
    k: Annotated[int, typer.Option(min=1, help="source layers per target layer and side")] = 8,
    rank: Annotated[int, typer.Option(min=1, help="rank r of the score's basis")] = 128,
    ridge: Annotated[float, typer.Option(min=0, help="lambda of equation 1")] = 0.01,
    tokens: Annotated[int, typer.Option(min=1, help="calibration tokens, after the stride")] = 128_000,
    stride: Annotated[int, typer.Option(min=1, help="take each n-th position")] = 1,
    seed: Annotated[int, typer.Option(help="of the offsets of the stride")] = 0,
    dtype: Annotated[MapDtype, typer.Option(help="of the map's weights")] = "float32",
    selector: Annotated[str, typer.Option(help="selector of the acceptance record")] = "rank_disagreement",
    rho: Annotated[float, typer.Option(min=0, max=1, help="budget of the acceptance record")] = 0.3,
    coverage: Annotated[Optional[float], typer.Option(min=0, max=1, help="budget by coverage instead of rho")] = None,
    accept_prompts: Annotated[int, typer.Option(min=2, help="held-out prompts to measure on")] = 48,
    checkpoint_tokens: Annotated[int, typer.Option(min=1, help="tokens between two checkpoints beside --out")] = 32_000,
    device: Annotated[str, typer.Option(help="where the models run")] = "cpu",
) -> None:
    """Fit a pack from one model to another, and measure it on held-out prompts.

    Several --structure are fitted from one pass, written to folders of their names inside --out, and compared.
    A calibration that was killed goes on where its last checkpoint was when the same command is given again.
    """
    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.acceptance import Repair
    from sglang_ext.offline.report import calibrate_and_report
    from sglang_ext.offline.settings import Settings

    try:
        settings = Settings(
            name=name or out.name, structures=tuple(dict.fromkeys(one.value for one in structure)), k=k, rank=rank, ridge=ridge,
            tokens=tokens, stride=stride, seed=seed, dtype=dtype, repair=Repair(selector, rho, coverage),
            accept_prompts=accept_prompts,
        )  # fmt: skip
        calibrate_and_report(source, target, data, out, settings, device, checkpoint_tokens)
    except KVLiftError as error:
        _fail(error)


def _fail(error: Exception) -> None:
    typer.echo(f"kvlift: {error}", err=True)
    raise typer.Exit(1) from error
