"""`kvlift documents`. Importing this module imports nothing heavy."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Optional

import typer

from sglang_ext.offline.documents.cli import evaluate

documents = typer.Typer(help="Documents compiled once and reused anywhere.", no_args_is_help=True)


class TrainedMethod(str, Enum):
    """Methods that are trained."""

    packet = "packet"
    sempic = "sempic"
    joint = "joint"


class Precision(str, Enum):
    """In which the base model runs; what is trained is float32."""

    bfloat16 = "bfloat16"
    float32 = "float32"


documents.command()(evaluate)


@documents.callback()
def _documents() -> None:
    """Documents compiled once and reused anywhere."""


@documents.command()
def train(
    model: Annotated[str, typer.Option(help="the base: a Llama or Qwen3 folder, or a hub name")],
    data: Annotated[str, typer.Option(help="JSON lines of spans, tiny:N or tiny-LAYOUT:N")],
    out: Annotated[Path, typer.Option(help="folder for the adapter")],
    method: Annotated[TrainedMethod, typer.Option(help="soft tokens, a LoRA Writer, or both")] = TrainedMethod.sempic,
    limit: Annotated[Optional[int], typer.Option(min=1, help="the first so many records")] = None,
    rank: Annotated[int, typer.Option(min=1, help="of LoRA on q/k/v/o")] = 8,
    alpha: Annotated[float, typer.Option(min=0.0, help="LoRA's scale is alpha / rank")] = 16.0,
    soft: Annotated[int, typer.Option(min=1, help="header tokens, and as many trailer tokens")] = 8,
    epochs: Annotated[int, typer.Option(min=1)] = 5,
    rate: Annotated[float, typer.Option(min=0.0, help="learning rate, falling in a straight line to zero")] = 5e-4,
    temperature: Annotated[float, typer.Option(min=0.0, help="tau of equation 8")] = 1.0,
    batch: Annotated[int, typer.Option(min=1, help="records of one update")] = 64,
    microbatch: Annotated[int, typer.Option(min=1, help="records of one forward")] = 8,
    answer: Annotated[int, typer.Option(min=1, help="most tokens of a teacher's answer")] = 64,
    seed: Annotated[int, typer.Option(help="of adapter, soft tokens and order")] = 0,
    checkpointing: Annotated[
        bool, typer.Option("--checkpointing/--no-checkpointing", help="KV gradient checkpointing: less memory, more time")
    ] = True,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="updates between two files to resume from")] = 20,
    device: Annotated[str, typer.Option(help="where the model runs")] = "cpu",
    dtype: Annotated[Precision, typer.Option(help="in which the base runs")] = Precision.bfloat16,
) -> None:
    """Train what compiles documents, by distillation from the base's own answers to full prompts.

    A training that was killed goes on where its last checkpoint was when the same command is given again.
    """
    from pydantic import ValidationError

    from sglang_ext.documents.checkpointing import checkpointed, direct
    from sglang_ext.documents.settings import TrainSettings
    from sglang_ext.documents.training import train_and_report
    from sglang_ext.errors import KVLiftError

    try:
        settings = TrainSettings(
            method=method.value, rank=rank, alpha=alpha, soft=soft, epochs=epochs, rate=rate, temperature=temperature,
            batch=batch, microbatch=microbatch, answer=answer, seed=seed,
        )  # fmt: skip
        run = checkpointed if checkpointing else direct
        train_and_report(model, data, limit, out, settings, run, device, dtype.value, checkpoint_every)
    except ValidationError as error:
        _fail(f"{error.errors()[0]['loc'][0]}: {error.errors()[0]['msg']}")
    except KVLiftError as error:
        _fail(error)


@documents.command()
def bench(
    worker: Annotated[Optional[str], typer.Option(help="address of a worker that runs; unset: one is started")] = None,
    model: Annotated[
        Optional[Path], typer.Option(help="model of the worker that is started; by default one with random weights")
    ] = None,
    lengths: Annotated[str, typer.Option(help="tokens of each document")] = "128,256,512,1024,2048",
    count: Annotated[int, typer.Option("--documents", min=1, help="documents of a prompt")] = 4,
    inline: Annotated[int, typer.Option(min=1, help="tokens that are no document's, the template's included")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="each times both once; medians are reported")] = 5,
    out: Annotated[Path, typer.Option(help="JSON of the rows; a PNG goes beside it")] = Path(
        "results/documents-ttft.json"
    ),
) -> None:
    """Time to first token over HTTP: documents that are compiled and linked, against full prefill of the same prompt.

    An interrupt (Ctrl-C) keeps what is measured by then.
    """
    import httpx
    from rich.console import Console

    from sglang_ext.documents.bench.measure import Plan
    from sglang_ext.documents.bench.report import bench_worker
    from sglang_ext.errors import KVLiftError
    from sglang_ext.offline.load_pair import make_pair

    try:
        wanted = tuple(int(part) for part in lengths.split(","))
        if min(wanted) < 1:
            raise ValueError(min(wanted))
    except ValueError as error:
        raise typer.BadParameter(f"--lengths {lengths!r}: expected numbers with commas between, as 128,512") from error
    try:
        folder = model or Path() if worker else model or make_pair("default", 0) / "target"
        bench_worker(worker, folder, Plan(wanted, count, inline, rounds), out, Console())
    except (KVLiftError, httpx.HTTPError) as error:
        _fail(error)
    except KeyboardInterrupt as stop:
        raise typer.Exit(130) from stop


@documents.command()
def memory(
    tokens: Annotated[list[int], typer.Option(help="tokens per document; repeatable")] = [256, 1024, 2000],  # noqa: B006
    count: Annotated[int, typer.Option("--documents", min=1, help="documents of the prompt")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="of each measured process")] = 1,
    device: Annotated[str, typer.Option(help="where the model runs")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder for documents-memory.json and .png")] = Path("results"),
) -> None:
    """Peak memory and time of one training step with KV gradient checkpointing and without (table 3)."""
    from sglang_ext.documents.memory_report import report_memory
    from sglang_ext.errors import KVLiftError

    try:
        report_memory(tokens, count, device, threads, out)
    except KVLiftError as error:
        _fail(error)


def _fail(why: object) -> None:
    typer.echo(f"kvlift: {why}", err=True)
    raise typer.Exit(1)
