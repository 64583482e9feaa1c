"""What a dataset gives: items that score an answer's text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["accuracy", "f1", "none"]
Dropped = Counter[str]  # reason -> how many items a loader left out, or mended

# (an answer's text, the gold answers) -> [0, 1]
Rule = Callable[[str, tuple[str, ...]], float]


@dataclass(frozen=True)
class Item:
    """One prompt with its gold answers. `record` is what corpus.encode takes: `messages` or `text`.

    kind: `none` for a prompt that has no answer, for fidelity alone; documents: the slices of the prompt's text, in order,
    that can be compiled by themselves.
    """

    id: str
    task: str
    record: dict[str, Any]
    gold: tuple[str, ...]
    rule: Rule
    kind: Kind
    max_new_tokens: int
    documents: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, str]]:
        return self.record.get("messages", [])

    def score(self, text: str) -> float:
        """How right an answer is, in [0, 1]."""
        return self.rule(text, self.gold)


@dataclass(frozen=True)
class Dataset:
    """Items in their order, and what was left out, by reason."""

    name: str
    items: tuple[Item, ...]
    dropped: dict[str, int]


def user(text: str) -> dict[str, Any]:
    """A record of one user message."""
    return {"messages": [{"role": "user", "content": text}]}
