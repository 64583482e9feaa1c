"""`kvlift documents train`: loads the base, teaches, distils, saves the adapter; shows how far it is."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import TextColumn
from rich.table import Table
from transformers import AutoTokenizer

from sglang_ext.documents.adapter import Base, Manifest, save_adapter
from sglang_ext.documents.checkpointing import Run
from sglang_ext.documents.corpus import Corpus, read_corpus
from sglang_ext.documents.distil import Distillation, train
from sglang_ext.documents.settings import Progress, TrainSettings
from sglang_ext.documents.teacher import open_cache, teach
from sglang_ext.documents.trainable import Trainable
from sglang_ext.hub import local_folder
from sglang_ext.offline.bars import Bars
from sglang_ext.offline.checkpoint import Checkpoint
from sglang_ext.offline.executor import TransformersExecutor


class RichProgress(Bars, Progress):
    """Of a training: two bars."""

    def __init__(self) -> None:
        super().__init__(TextColumn("left"))

    def taught(self, seen: int, wanted: int) -> None:
        self.show("teacher's answers", seen, wanted)

    def updates(self, seen: int, wanted: int, loss: float | None) -> None:
        found = "" if loss is None else f", loss {loss:.4f}"
        self.show("updates", seen, wanted, found)

    def resumed(self, updates: int) -> None:
        self.say(f"going on from a checkpoint: {updates} updates need not be made again")


def train_writer(
    executor: TransformersExecutor,
    base: Base,
    corpus: Corpus,
    data: str,
    stop: tuple[int, ...],
    settings: TrainSettings,
    run: Run,
    out: Path,
    every: int,
    progress: Progress,
) -> Manifest:
    """Trains an adapter and writes it to `out`. Leaves the adapter in the executor's model, switched off.

    base, data: what the manifest says of model and corpus; stop: tokens that end an answer; every: updates between two
    checkpoints beside `out`, from which a killed training goes on and gives the same adapter to the bit.
    """
    cache = open_cache(executor, corpus, settings.answer)
    wanted = len(corpus.records)
    teach(executor, corpus.records, cache, settings.answer, stop, lambda seen: progress.taught(seen, wanted))
    trainable = Trainable(executor, settings)
    distillation = Distillation(trainable, corpus, cache, run)
    checkpoint = Checkpoint(out, every)
    made_for = {"data": corpus.digest, **base.model_dump(), **settings.model_dump(mode="json")}
    train(distillation, corpus, {name: str(value) for name, value in made_for.items()}, checkpoint, progress)
    manifest = Manifest(
        base=base, settings=settings, data=data, data_digest=corpus.digest, records=wanted,
        updates=distillation.steps, loss=tuple(round(loss, 6) for loss in distillation.epoch_losses),
    )  # fmt: skip
    manifest = save_adapter(out, trainable, manifest)
    checkpoint.delete()
    return manifest


def train_and_report(
    model: str,
    data: str,
    limit: int | None,
    out: Path,
    settings: TrainSettings,
    run: Run,
    device: str,
    dtype: str,
    every: int,
) -> None:
    """Loads the model, trains, prints the loss of each epoch."""
    folder = local_folder(model)
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    corpus = read_corpus(data, tokenizer, limit)
    console = Console()
    if corpus.split or corpus.open:
        console.print(
            f"left out: {corpus.split} records with a token across a document's border, {corpus.open} without a "
            "document or without inline text at the end"
        )
    executor = TransformersExecutor.from_folder(folder, device, getattr(torch, dtype))
    base = Base(name=folder.name, model=executor.identity.model, tokenizer=executor.identity.tokenizer, dtype=dtype)
    stop = _stop_tokens(executor, tokenizer)
    with RichProgress() as progress:
        manifest = train_writer(executor, base, corpus, data, stop, settings, run, out, every, progress)
    show(manifest, out, console)


def show(manifest: Manifest, out: Path, console: Console) -> None:
    """Prints the loss of each epoch."""
    s = manifest.settings
    table = Table(
        title=f"{s.method}, {manifest.base.name}: {manifest.records} records, {manifest.updates} updates, seed {s.seed}"
    )
    table.add_column("epoch", justify="right")
    table.add_column("KL to the teacher, nats per token", justify="right")
    for epoch, loss in enumerate(manifest.loss, start=1):
        table.add_row(str(epoch), f"{loss:.5f}")
    console.print(table)
    console.print(f"adapter {manifest.digest[:12]} written to {out}")


def _stop_tokens(executor: TransformersExecutor, tokenizer) -> tuple[int, ...]:
    """The tokens that end a turn: the model's generation settings, or the tokenizer's."""
    given = executor.model.generation_config.eos_token_id
    if given is None:
        given = tokenizer.eos_token_id
    return tuple(given) if isinstance(given, list) else (given,)
