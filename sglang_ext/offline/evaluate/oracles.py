"""Selectors that read the target's own prefill: for evaluation only, since a worker has none to read.

They hold the map and its predictions fixed, so that only the choice of what is recomputed differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.block import KVBlock
from sglang_ext.offline.executor import Row, TransformersExecutor
from sglang_ext.plan import Fill, FillKind, PrefillPlan, repaired
from sglang_ext.transfer.selectors import Budget, scorer_named, top_positions

TARGET_ATTENTION = "target_attention"
MAPPING_ERROR = "mapping_error"
LAYER_PREFIX = "layer_prefix"


@dataclass
class Case:
    """One prompt of T tokens under one pack.

    native: the target's own prefill; filled: the mapped KV of the positions before the last; block: the source's KV
    of them; disagreement: float32 [layers, T - 1]. Reading a case changes none of its rows.
    """

    target: TransformersExecutor
    ids: Sequence[int]
    native: Row
    filled: Row
    block: KVBlock
    disagreement: torch.Tensor
    _scores: dict[str, torch.Tensor] = field(default_factory=dict)

    def scores(self, selector: str) -> torch.Tensor:
        """float32 [T - 1] by the name of a selector or an oracle, computed once."""
        if selector not in self._scores:
            oracle = ORACLES.get(selector)
            self._scores[selector] = oracle(self) if oracle else scorer_named(selector)(self.block, self.disagreement)
        return self._scores[selector]

    def lifted(self, selector: str, budget: Budget, spare: int) -> tuple[Row, PrefillPlan]:
        """A copy of the filled row with room for `spare` more tokens, and the plan to compute what is chosen of it."""
        return self._copy(0, spare), self._plan(top_positions(self.scores(selector), budget))

    def lifted_by_layers(self, rho: float, spare: int) -> tuple[Row, PrefillPlan]:
        """The same with all positions recomputed in the first ceil(rho * L) layers (DroidSpeak's way, section 4.5).

        Those layers see nothing of the map, so that their KV is the native prefill's. Above them the KV stays mapped;
        the last position is computed in every layer.
        """
        layers = math.ceil(round(rho * self.target.geometry.layers, 9))  # 0.3 of 10 is 3 in decimal
        return self._copy(layers, spare), self._plan(torch.tensor([], dtype=torch.int64))

    def _copy(self, native_layers: int, spare: int) -> Row:
        row = self.target.row(len(self.ids) + spare)
        for side in ("keys", "values"):
            mine, native, mapped = (getattr(one, side) for one in (row, self.native, self.filled))
            before_last = slice(0, len(self.ids) - 1)
            mine[:native_layers, before_last] = native[:native_layers, before_last]
            mine[native_layers:, before_last] = mapped[native_layers:, before_last]
        return row

    def _plan(self, positions: torch.Tensor) -> PrefillPlan:
        return repaired(len(self.ids), [Fill(0, len(self.ids) - 1, FillKind.MAPPED)], positions)


def mapping_error(case: Case) -> torch.Tensor:
    """||mapped - true||^2 / ||true||^2, keys and values together: float32 [layers, T - 1] (section 2.2)."""
    before_last = slice(0, len(case.ids) - 1)
    error = energy = 0.0
    for side in ("keys", "values"):
        true, mapped = (getattr(row, side)[:, before_last].float() for row in (case.native, case.filled))
        error = error + (mapped - true).square().sum((-1, -2))
        energy = energy + true.square().sum((-1, -2))
    return error / energy


def _mean_mapping_error(case: Case) -> torch.Tensor:
    """CacheBlend's rule at its strongest: the error against the target's actual cache, averaged over layers."""
    return mapping_error(case).mean(0)


def _target_attention(case: Case) -> torch.Tensor:
    """What the target's own last queries attend to."""
    return case.target.attention_received(case.native, case.ids)[:-1]


ORACLES: dict[str, Callable[[Case], torch.Tensor]] = {
    TARGET_ATTENTION: _target_attention,
    MAPPING_ERROR: _mean_mapping_error,
}
