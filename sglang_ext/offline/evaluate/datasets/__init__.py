"""Datasets by name: `load("gsm8k:test.jsonl")`. This is the only place that knows which kinds there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from sglang_ext.documents.tasks import LAYOUTS
from sglang_ext.offline.evaluate.datasets import choices, corpus, documents, family, gsm8k, multihop
from sglang_ext.offline.evaluate.datasets.items import Dataset, Dropped, Item
from sglang_ext.offline.evaluate.errors import EvaluationError

# From a file or folder, and a place to count what is left out, to items.
_FILES: dict[str, Callable[[Path, Dropped], Iterator[Item]]] = {
    "gsm8k": gsm8k.read,
    "mmlu-redux": choices.read_mmlu_redux,
    "arc": choices.read_arc,
    "multihop": multihop.read,
    "corpus": corpus.read,
}
# From the number of items of each task to items.
_GENERATED: dict[str, Callable[[int], Iterator[Item]]] = {
    "family": partial(family.read, "test"),
    "family-dev": partial(family.read, "dev"),
    "documents": partial(documents.read_tiny, tuple(LAYOUTS)),
    **{f"documents-{name}": partial(documents.read_tiny, (name,)) for name in LAYOUTS},
    "biographies": partial(documents.read_sentences, "biography", "test"),
    "biographies-dev": partial(documents.read_sentences, "biography", "dev"),
    "sums": partial(documents.read_sentences, "arithmetic", "test"),
    "needles": documents.read_needles,
}
FORMS = ", ".join([*(f"{name}:N" for name in _GENERATED), *(f"{name}:PATH" for name in _FILES)])


def load(name: str, limit: int | None = None) -> Dataset:
    """The dataset that a name such as `family:500` or `mmlu-redux:FOLDER` stands for.

    limit: the first so many items of each task. Raises EvaluationError for an unknown name, a broken record
    (with its file and line), two items with one id, and a dataset without items.
    """
    kind, _, where = name.partition(":")
    dropped: Dropped = Counter()
    if kind in _GENERATED and where.isdigit():
        items = _GENERATED[kind](int(where))
    elif kind in _FILES and where:
        items = _FILES[kind](Path(where).expanduser(), dropped)
    else:
        raise EvaluationError(f"dataset {name!r} is not known; expected one of {FORMS}")
    kept = list(_first(items, limit))
    if not kept:
        raise EvaluationError(f"dataset {name!r} holds no items{_because(dropped)}")
    [(most, count)] = Counter(item.id for item in kept).most_common(1)
    if count > 1:
        raise EvaluationError(f"dataset {name!r} holds {count} items with the id {most!r}; ids must differ")
    return Dataset(name, tuple(kept), dict(dropped))


def _first(items: Iterator[Item], limit: int | None) -> Iterator[Item]:
    seen: Counter[str] = Counter()
    for item in items:
        seen[item.task] += 1
        if limit is None or seen[item.task] <= limit:
            yield item


def _because(dropped: Dropped) -> str:
    return f": {sum(dropped.values())} dropped ({', '.join(dropped)})" if dropped else ""
