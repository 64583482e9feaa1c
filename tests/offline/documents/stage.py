"""A tiny random reader and source over the family's tokenizer, a pack of noise between them, and prompts with documents."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.libraries import MAPPED, NO_CACHE, PLAIN, Arm, Library
from sglang_ext.offline.documents.run import Evaluation, Results
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item, user
from sglang_ext.offline.evaluate.datasets.scoring import token_f1
from sglang_ext.offline.evaluate.run import Model
from sglang_ext.offline.evaluate.store import Store
from sglang_ext.offline.family.vocabulary import ITEMS, NAMES
from tests.kv.models import tokenizer
from tests.offline.evaluate import stage

LIMIT = 5
REFERENCES = (Arm(FULL), Arm(NO_RECOMPUTE), Arm(NO_CACHE))


def reader() -> Model:
    return stage.target()


def items(count: int = 4, seed: int = 0) -> list[Item]:
    """One to three documents of different lengths, two tasks in turn."""
    rng = random.Random(seed)
    made = []
    for index in range(count):
        names = rng.sample(NAMES, 1 + index % 3)
        documents = tuple(f" {name} has {' '.join(rng.sample(ITEMS, 2 + index % 2))}." for name in names)
        text = f"Text:{''.join(documents)} What?"
        made.append(Item(str(index), f"task{index % 2}", user(text), (documents[0],), token_f1, "f1", LIMIT, documents))
    return made


def plain(*arms: Arm) -> Library:
    return Library(PLAIN, PLAIN, PLAIN, Compiler(reader().executor), (*REFERENCES, *arms), {"documents": PLAIN})


def mapped(*arms: Arm) -> Library:
    compiler = Compiler(stage.source().executor)
    return Library("noise", "noise", MAPPED, compiler, arms, {"documents": "noise"}, stage.pack().maps)


def run(
    folder: Path, libraries: Sequence[Library], chosen: Sequence[Item] | None = None, ticks: list | None = None
) -> tuple[Evaluation, Results]:
    evaluation = Evaluation(reader(), libraries, tokenizer(), Store(folder))
    seen = [] if ticks is None else ticks
    dataset = Dataset("documents", tuple(items() if chosen is None else chosen), {})
    return evaluation, evaluation.run(dataset, lambda done, total: seen.append((done, total)))
