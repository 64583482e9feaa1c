"""Two tiny random models over the family's tokenizer, a pack of noise between them, and short questions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from sglang_ext.offline.evaluate.arms import Arm
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item, user
from sglang_ext.offline.evaluate.datasets.scoring import token_f1
from sglang_ext.offline.evaluate.measures import Answers, Fidelity
from sglang_ext.offline.evaluate.run import Evaluation, Model, Pair, Results
from sglang_ext.offline.evaluate.store import Store
from sglang_ext.offline.family.vocabulary import ITEMS, NAMES
from sglang_ext.transfer.pack import LayerRecord, Manifest, ModelRecord, Pack
from tests.kv.models import executor, noise_maps, tokenizer

LAYERS = 4


@cache
def target() -> Model:
    return Model("large", executor("qwen3", 1, layers=LAYERS, vocabulary=len(tokenizer())))


@cache
def source() -> Model:
    return Model("small", executor("qwen3", 2, layers=2, vocabulary=len(tokenizer())))


@cache
def pack() -> Pack:
    """A map that knows nothing, so that only what is recomputed can be right."""
    ours, theirs = source().executor, target().executor
    maps = noise_maps(ours.geometry, theirs.geometry)
    records = tuple(
        {side: LayerRecord(sources=one.sources, r2=0.0, r2_held_out=0.0) for side, one in sides.items()}
        for sides in maps.layers
    )
    manifest = Manifest(
        name="noise", source=ModelRecord.of("small", ours.identity, ours.geometry),
        target=ModelRecord.of("large", theirs.identity, theirs.geometry), dtype="float32", k=2, rank=4, ridge=0.0,
        corpus="none", corpus_digest="", tokens=1, stride=1, seed=0, layers=records, weights_sha256="noise",
    )  # fmt: skip
    return Pack(manifest, maps)


def items(count: int = 5, limit: int = 6, seed: int = 0) -> list[Item]:
    """Questions of different lengths, two tasks in turn; their gold is a word of the prompt."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        names, things = rng.sample(NAMES, 2 + index % 3), rng.sample(ITEMS, 4)
        text = "Who has what? " + " and ".join(f"{name} has {' '.join(things)}" for name in names)
        made.append(Item(str(index), f"task{index % 2}", user(text), (things[0],), token_f1, "f1", limit))
    return made


def run(
    folder: Path,
    arms: Sequence[Arm],
    chosen: Sequence[Item] | None = None,
    batch: int = 3,
    measure: Literal["answers", "fidelity"] = "answers",
    ticks: list | None = None,
    agreement_rho: float | None = None,
) -> tuple[Evaluation, Results]:
    how = Answers(tokenizer()) if measure == "answers" else Fidelity()
    pair = Pair(source(), pack(), tuple(arms), agreement_rho)
    evaluation = Evaluation(target(), [pair], tokenizer(), how, Store(folder), batch)
    seen = [] if ticks is None else ticks
    dataset = Dataset("questions", tuple(items() if chosen is None else chosen), {})
    return evaluation, evaluation.run(dataset, lambda done, total: seen.append((done, total)))
