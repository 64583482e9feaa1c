"""The prefill plan: where the KV of each position of a prompt comes from.

Every method of the house is a function that makes a plan. Native prefill fills nothing and computes
everything; linear transfer fills all but the last position; RaReCache fills all and computes those
that the score picks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Sequence

import torch

from sglang_ext.errors import PlanError


class FillKind(str, Enum):
    """Where a fill's KV comes from."""

    PREFIX = "prefix"  # this worker's own radix tree
    MAPPED = "mapped"  # another model's block through a pack
    DOCUMENT = "document"  # this model's own block of a document, compiled by itself


@dataclass(frozen=True)
class Fill:
    """The positions [start, stop) take their KV from `kind`."""

    start: int
    stop: int
    kind: FillKind

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class PrefillPlan:
    """One prompt's fills and the positions that the model runs.

    `length` is T; `compute` is int64 [C], sorted, and always ends with T - 1, because the last
    position gives the first token's logits. Fills and compute cover each position exactly once:
    `fills` says what is loaded, and a computed position inside a fill's span is excluded from it
    through `compute`, so that spans stay contiguous.
    """

    length: int
    fills: tuple[Fill, ...]
    compute: torch.Tensor

    def __post_init__(self) -> None:
        if self.length < 1:
            raise PlanError(f"a plan needs at least one position, got length {self.length}")
        chosen = self.compute
        if chosen.dtype != torch.int64 or chosen.dim() != 1 or len(chosen) == 0:
            raise PlanError("compute must be a non-empty int64 vector of positions")
        if bool((chosen[1:] <= chosen[:-1]).any()):
            raise PlanError("compute must be sorted and without repeats")
        if int(chosen[0]) < 0 or int(chosen[-1]) != self.length - 1:
            raise PlanError(
                f"compute must lie in [0, {self.length}) and end with the last position "
                f"{self.length - 1}; it runs from {int(chosen[0])} to {int(chosen[-1])}"
            )
        loaded = torch.zeros(self.length, dtype=torch.int64)
        for fill in self.fills:
            if not 0 <= fill.start <= fill.stop <= self.length:
                raise PlanError(f"{fill} lies outside a prompt of {self.length} positions")
            loaded[fill.start : fill.stop] += 1
        loaded[chosen] += (loaded[chosen] == 0).to(torch.int64)
        wrong = torch.nonzero(loaded != 1).flatten()
        if len(wrong):
            what = "filled twice" if int(loaded[wrong[0]]) > 1 else "neither filled nor computed"
            raise PlanError(f"position {int(wrong[0])} of {self.length} is {what}")

    @property
    def filled(self) -> torch.Tensor:
        """int64: the positions whose KV is loaded and not computed."""
        kept = torch.zeros(self.length, dtype=torch.bool)
        for fill in self.fills:
            kept[fill.start : fill.stop] = True
        kept[self.compute] = False
        return torch.nonzero(kept).flatten()


def native(length: int) -> PrefillPlan:
    """The plan of an ordinary prefill: nothing filled, everything computed."""
    return PrefillPlan(length, (), torch.arange(length))


def budget_size(rho: float, length: int) -> int:
    """ceil(rho * T), the recompute budget of section 3.2, at least 1: the last position counts.

    Raises PlanError for a rho outside [0, 1].
    """
    if not 0.0 <= rho <= 1.0:
        raise PlanError(f"rho must lie in [0, 1], got {rho}")
    # 0.3 * 10 is 3.0000000000000004 in binary; the budget is meant in decimal.
    return max(1, math.ceil(round(rho * length, 9)))


def repaired(length: int, fills: Sequence[Fill], positions: torch.Tensor) -> PrefillPlan:
    """A plan over `fills` that computes `positions`, every gap between fills, and the last position.

    Raises PlanError for a position outside the prompt.
    """
    if length < 1:
        raise PlanError(f"a plan needs at least one position, got length {length}")
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < length:
        raise PlanError(
            f"positions to compute must lie in [0, {length}), "
            f"they run from {int(positions.min())} to {int(positions.max())}"
        )
    computed = torch.ones(length, dtype=torch.bool)
    for fill in fills:
        computed[fill.start : fill.stop] = False
    computed[positions] = True
    computed[length - 1] = True
    return PrefillPlan(length, tuple(fills), torch.nonzero(computed).flatten())
