"""The most that a lift can be faster than native prefill, by counting operations (equation 11)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.transfer.maps import CrossModelMap


@dataclass(frozen=True)
class Costs:
    """What equation 11 counts.

    body: P_T, parameters that every token of the target passes through; map: P_map; probe: P_probe, those of
    the score; alpha: 4 * layers * query heads * head_dim, operations per pair of query and key.
    """

    body: int
    map: int
    probe: int
    alpha: int

    @classmethod
    def of(cls, target: TransformersExecutor, maps: CrossModelMap) -> Costs:
        """Counted from a loaded target and its maps.

        The body is the matrices of the layers: neither embeddings nor the head, which native prefill and lift
        apply to one position alike; nor an adapter, which is off while the target reads. The probe is z V_r, which is
        all that the score of appendix A multiplies.
        """
        parts = target.model.model.layers.named_modules()
        linear = [one for name, one in parts if isinstance(one, nn.Linear) and ".lora_" not in name]
        sides = [one for layer in maps.layers for one in layer.values()]
        g = target.geometry
        return cls(
            body=sum(one.weight.numel() for one in linear),
            map=sum(one.weight.numel() for one in sides),
            probe=sum(one.basis.numel() for one in sides),
            alpha=4 * g.layers * g.query_heads * g.head_dim,
        )

    def ceiling_dense(self, tokens: int, rho: float) -> float:
        """Equation 11: the recompute attends with a dense mask, rho alpha T^2. Falls towards 1 / (2 rho)."""
        return self.native(tokens) / (self._linear(tokens, rho) + rho * self.alpha * tokens**2)

    def ceiling_frontier(self, tokens: int, rho: float) -> float:
        """With frontier-causal attention, rho alpha T^2 / 2 (appendix B.4). Tends to 1 / rho."""
        return self.native(tokens) / (self._linear(tokens, rho) + rho * self.alpha * tokens**2 / 2)

    def native(self, tokens: int) -> float:
        """Operations of a native prefill of one prompt."""
        return 2 * self.body * tokens + self.alpha * tokens**2 / 2

    def _linear(self, tokens: int, rho: float) -> float:
        return 2 * (self.map + self.probe + rho * self.body) * tokens
