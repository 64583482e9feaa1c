"""Which positions to recompute: a score per token, and a budget that takes the largest of them.

Every selector is a function from a block and the map's predictions to one score per token. The three here
need no pass of the target, so that a worker can use them; those that read the target's own prefill
are oracles and live with the evaluation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Protocol

import torch
import xxhash

from sglang_ext.block import KVBlock
from sglang_ext.errors import PlanError
from sglang_ext.plan import budget_size

RANK_DISAGREEMENT = "rank_disagreement"
RANDOM = "random"
SOURCE_ATTENTION = "source_attention"
NAMES = (RANK_DISAGREEMENT, RANDOM, SOURCE_ATTENTION)

# (block of n tokens, disagreement: float32 [target layers, n]) -> scores: float [n]
Scorer = Callable[[KVBlock, torch.Tensor], torch.Tensor]


def scorer_named(name: str) -> Scorer:
    """`rank_disagreement`, `source_attention`, `random` or `random:SEED`. Raises PlanError for another name."""
    kind, _, seed = name.partition(":")
    if kind == RANDOM and (seed.isdigit() or name == RANDOM):
        return _Random(int(seed or 0))
    known: dict[str, Scorer] = {RANK_DISAGREEMENT: _rank_disagreement, SOURCE_ATTENTION: _source_attention}
    if name not in known:
        raise PlanError(f"selector {name!r} is not known; expected one of {', '.join(NAMES)} or {RANDOM}:SEED")
    return known[name]


def needs_attention(name: str) -> bool:
    """Whether the source must say how much attention each token received."""
    return name == SOURCE_ATTENTION


class Budget(Protocol):
    """How many of the positions with the largest scores are recomputed."""

    def size(self, ranked: torch.Tensor, length: int) -> int:
        """Positions to take, the last of the prompt not among them.

        ranked: the scores in descending order, one for each position before the last; length: T.
        """
        ...


@dataclass(frozen=True)
class Fraction:
    """ceil(rho * T) positions, the last one among them (section 3.2)."""

    rho: float

    def size(self, ranked: torch.Tensor, length: int) -> int:
        return min(budget_size(self.rho, length) - 1, len(ranked))


@dataclass(frozen=True)
class Coverage:
    """The smallest set that holds this share of the scores' sum: an easy prompt costs less than an unfamiliar one."""

    share: float

    def size(self, ranked: torch.Tensor, length: int) -> int:
        if not 0.0 <= self.share <= 1.0:
            raise PlanError(f"coverage must lie in [0, 1], got {self.share}")
        held = ranked.double().cumsum(0)
        # The sum itself is compared, so that a share of 1 takes exactly the scores above 0.
        return int((held < self.share * held[-1]).sum()) + 1 if len(held) and self.share * held[-1] > 0 else 0


def budget_of(rho: float, coverage: float | None) -> Budget:
    """The budget that a request states: by coverage where it gives one, else by fraction."""
    return Fraction(rho) if coverage is None else Coverage(coverage)


def top_positions(scores: torch.Tensor, budget: Budget) -> torch.Tensor:
    """The positions to recompute out of T = len(scores) + 1, less the last one.

    scores: float [T - 1], one for each position but the last. The last position is always computed,
    by the decode step that follows, and counts towards the budget. Returns int64, ascending; ties go
    to the earlier position, so that the choice does not depend on the sort. Raises PlanError for scores
    that are not finite and for a budget out of range.
    """
    if not bool(torch.isfinite(scores).all()):
        raise PlanError("scores hold NaN or infinite numbers: the block or the pack is damaged")
    ranked = torch.sort(scores, descending=True, stable=True)
    return ranked.indices[: budget.size(ranked.values, len(scores) + 1)].sort().values


def _rank_disagreement(_block: KVBlock, disagreement: torch.Tensor) -> torch.Tensor:
    """s_i (equation 2): the sum over layers and sides."""
    return disagreement.sum(0)


def _source_attention(block: KVBlock, _disagreement: torch.Tensor) -> torch.Tensor:
    """What the source's last queries attend to (section 2.2)."""
    if block.attention is None:
        raise PlanError("the block does not say what attention its tokens received; export it with attention")
    return block.attention


@dataclass(frozen=True)
class _Random:
    """An order drawn from the seed and the tokens, so that one prompt always gets the same."""

    seed: int

    def __call__(self, block: KVBlock, disagreement: torch.Tensor) -> torch.Tensor:
        digest = xxhash.xxh3_64_intdigest(block.tokens.numpy().tobytes(), seed=self.seed)
        generator = torch.Generator().manual_seed(digest % 2**63)
        return torch.rand(len(block), generator=generator).to(disagreement.device)
