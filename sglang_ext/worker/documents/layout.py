"""A prompt with its documents found in it, and which of their tokens are computed besides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, NamedTuple, Sequence

import torch

from sglang_ext.documents.document import SOFT
from sglang_ext.documents.link import Linked, link, locate
from sglang_ext.transfer.selectors import Fraction, top_positions
from sglang_ext.worker.documents.shelf import Shelved

_PLACEHOLDER = 0  # stands for a soft entry where SGLang wants the id of a token


class Standing(NamedTuple):
    """A document in a prompt: the key of its KV, and the position of its first entry."""

    key: str
    start: int


class Budget(NamedTuple):
    """What is computed of the documents: the first `leading` tokens of each, and the share `rho` of a mapped one.

    That share is of largest rank disagreement, as in a lift.
    """

    leading: int
    rho: float


@dataclass(frozen=True)
class Layout:
    """starts: of each document, None where it is no slice; missed: tokens of those, which are inline."""

    linked: Linked
    standing: tuple[Standing, ...]
    starts: tuple[int | None, ...]
    missed: int

    @property
    def ids(self) -> list[int]:
        """What SGLang's tree and its batches take the prompt for."""
        return torch.where(self.linked.tokens == SOFT, _PLACEHOLDER, self.linked.tokens).tolist()


def laid_out(ids: list[int], documents: Mapping[str, Shelved], order: Sequence[str], budget: Budget) -> Layout:
    """order: keys of the documents, as they stand in the prompt."""
    located = locate(ids, [documents[key].document for key in order])
    linked = link(located.spans)
    missed = set(located.missed)
    found = [key for index, key in enumerate(order) if index not in missed]
    computed = [_computed(documents[key], one.own, budget) for key, one in zip(found, linked.placed, strict=True)]
    if any(len(positions) for positions in computed):
        linked = linked.computing(torch.cat(computed))
    standing = tuple(Standing(key, one.start) for key, one in zip(found, linked.placed, strict=True))
    starts = iter(one.start for one in standing)
    lost = sum(len(documents[order[index]].document.ids) for index in missed)
    return Layout(
        linked, standing, tuple(None if index in missed else next(starts) for index in range(len(order))), lost
    )


def _computed(shelved: Shelved, own: range, budget: Budget) -> torch.Tensor:
    """int64: positions of one document's tokens."""
    leading = torch.arange(own.start, own.start + min(budget.leading, len(own)))
    if shelved.scores is None:
        return leading
    return torch.cat([leading, own.start + top_positions(shelved.scores, Fraction(budget.rho))])
