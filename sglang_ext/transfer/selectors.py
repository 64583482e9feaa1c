"""Which positions to recompute: functions from scores and a budget to positions."""

from __future__ import annotations

import torch

from sglang_ext.errors import PlanError
from sglang_ext.plan import budget_size

RANK_DISAGREEMENT = "rank_disagreement"


def top_positions(scores: torch.Tensor, rho: float) -> torch.Tensor:
    """The ceil(rho * T) positions to recompute out of T = len(scores) + 1, less the last one.

    scores: float [T - 1], one for each position but the last. The last position is always computed,
    by the decode step that follows, and counts towards the budget. Returns int64, ascending; ties go
    to the earlier position, so that the choice does not depend on the sort.
    """
    if not bool(torch.isfinite(scores).all()):
        raise PlanError("scores hold NaN or infinite numbers: the block or the pack is damaged")
    size = budget_size(rho, len(scores) + 1) - 1
    ranked = torch.sort(scores, descending=True, stable=True).indices
    return ranked[:size].sort().values
