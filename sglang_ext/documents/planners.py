"""Online planners: which of the documents' own tokens are computed with the inline ones (section 6's baselines).

They repair plain documents while the request waits, each by its own rule, at a budget over the documents' tokens:

    no_recompute        none
    full                all
    epic                the first n of each document
    random              a share, drawn
    cache_blend         the share whose KV a full prefill would change most, judged on one early layer
    a3                  the share that the query attends to most, judged on the first layer
    rank_disagreement   the share that a map from another model can be trusted least with (RaReCache, equation 2)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang_ext.documents.link import Linked
from sglang_ext.errors import PlanError
from sglang_ext.transfer.selectors import RANDOM, RANK_DISAGREEMENT, Scorer, scorer_named, top_positions

NO_RECOMPUTE, FULL, EPIC, CACHE_BLEND, A3 = "no_recompute", "full", "epic", "cache_blend", "a3"
NAMES = (NO_RECOMPUTE, FULL, EPIC, RANDOM, CACHE_BLEND, A3, RANK_DISAGREEMENT)

# KV of layer 0 depends on nothing but its token, so layer 1 is the first in which a document's context shows.
CHECK_LAYER = 1


class Evidence(Protocol):
    """What a planner may ask of a linked prompt of T positions whose documents are filled.

    disagreement: float32 [layers, T], the map's, where the documents are another model's; else [0, T].
    """

    disagreement: torch.Tensor

    def deviation(self, layer: int) -> torch.Tensor:
        """How far a full prefill's KV of this layer is from the filled: squared distance, float32 [T].

        Computes every token in the layers up to this one. Their native KV stays in the cache, as CacheBlend has it.
        """
        ...

    def asked(self) -> torch.Tensor:
        """The query's attention in layer 0 over the documents' own tokens alone: float32 [T], 0 elsewhere."""
        ...


Planner = Callable[[Linked, Evidence], Linked]
Score = Callable[[Linked, Evidence], torch.Tensor]  # float32 [T], of which only the candidates' are read


def planner_named(name: str, budget: float) -> Planner:
    """The rule by name, `random:SEED` included; budget: tokens of each document for epic, else a share in [0, 1].

    Raises PlanError for an unknown name or a budget out of range.
    """
    kind = name.partition(":")[0]
    if kind == NO_RECOMPUTE:
        return lambda linked, _evidence: linked
    if kind == FULL:
        return lambda linked, _evidence: linked.computing(linked.candidates)
    if kind == EPIC:
        return _Leading(budget)
    scores: dict[str, Score] = {CACHE_BLEND: _deviation, A3: _asked}
    if kind in (RANDOM, RANK_DISAGREEMENT):
        scores[kind] = _EachDocument(scorer_named(name))
    if kind not in scores:
        raise PlanError(f"planner {name!r} is not known; expected one of {', '.join(NAMES)} or {RANDOM}:SEED")
    return _Highest(scores[kind], _Share(budget))


@dataclass(frozen=True)
class _Leading:
    """EPIC: the tokens at each document's beginning, which hold most of what is missing."""

    count: float

    def __post_init__(self) -> None:
        if self.count < 0 or self.count != int(self.count):
            raise PlanError(f"epic takes a whole number of tokens of each document, got {self.count}")

    def __call__(self, linked: Linked, _evidence: Evidence) -> Linked:
        first = [torch.tensor(one.own[: int(self.count)], dtype=torch.int64) for one in linked.placed]
        return linked.computing(torch.cat([torch.arange(0), *first]))


@dataclass(frozen=True)
class _Share:
    """The Budget of these planners: a share of the documents' tokens, rounded down."""

    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise PlanError(f"the budget is a share of the documents' tokens in [0, 1], got {self.share}")

    def size(self, ranked: torch.Tensor, _length: int) -> int:
        return int(round(self.share * len(ranked), 9))  # 0.29 of 100 is 29 in decimal


@dataclass(frozen=True)
class _Highest:
    """The candidates with the largest scores."""

    score: Score
    budget: _Share

    def __call__(self, linked: Linked, evidence: Evidence) -> Linked:
        candidates = linked.candidates
        chosen = top_positions(self.score(linked, evidence)[candidates], self.budget)
        return linked.computing(candidates[chosen])


@dataclass(frozen=True)
class _EachDocument:
    """A selector of the lift, asked about one document after the other."""

    scorer: Scorer

    def __call__(self, linked: Linked, evidence: Evidence) -> torch.Tensor:
        scores = torch.zeros(len(linked))
        for one in linked.placed:
            found = self.scorer(one.document.block, evidence.disagreement[:, one.start : one.stop])
            scores[one.start : one.stop] = found.float().cpu()
        return scores


def _deviation(_linked: Linked, evidence: Evidence) -> torch.Tensor:
    return evidence.deviation(CHECK_LAYER)


def _asked(_linked: Linked, evidence: Evidence) -> torch.Tensor:
    return evidence.asked()
