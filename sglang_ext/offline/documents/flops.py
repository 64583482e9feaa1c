"""Operations of a cache-hit prefill, by counting (appendix D): what is done online before the first token's logits.

Counted are the matrices of the layers, attention, the moving of document keys, a planner's own scoring, the map of another
model's documents, and the output projection. Compiling documents is not: it happened before.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.documents.link import Linked
from sglang_ext.documents.planners import A3, CACHE_BLEND, CHECK_LAYER
from sglang_ext.geometry import KVGeometry
from sglang_ext.offline.bench.ceiling import Costs
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.transfer.maps import CrossModelMap


@dataclass(frozen=True)
class OnlineFlops:
    """What one reading model, and one map where there is one, cost. head: parameters of the output projection."""

    costs: Costs
    geometry: KVGeometry
    head: int

    @classmethod
    def of(cls, reader: TransformersExecutor, maps: CrossModelMap | None) -> OnlineFlops:
        costs = Costs.of(reader, CrossModelMap(()) if maps is None else maps)
        return cls(costs, reader.geometry, reader.model.lm_head.weight.numel())

    def count(self, linked: Linked, planner: str) -> int:
        """Of a planned prompt; planner: the name of the rule that planned it."""
        g, filled = self.geometry, sum(len(one.document) for one in linked.placed)
        moved = 3 * g.rope.rotary_dim * g.kv_heads * g.layers * filled
        mapped = 2 * (self.costs.map + self.costs.probe) * filled
        every = self._layers(len(linked), len(linked) * (len(linked) + 1) // 2)
        chosen = self._layers(len(linked.plan.compute), int((linked.plan.compute + 1).sum()))
        scored, own = 0.0, len(linked.candidates)
        if planner == CACHE_BLEND:
            share = (CHECK_LAYER + 1) / g.layers  # of the layers, which every token goes through
            scored = share * (every - chosen) + 6 * g.width * own
        elif planner == A3:
            scored = g.query_heads * len(linked.query) * own * (2 * g.head_dim + 5)
        return round(moved + mapped + chosen + scored) + 2 * self.head

    def _layers(self, tokens: int, pairs: int) -> int:
        """Of all layers; pairs: of a query and a key that it sees."""
        return 2 * self.costs.body * tokens + self.costs.alpha * pairs
