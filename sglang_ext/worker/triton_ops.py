"""The worker's operations on KV tensors as Triton kernels. Imported only where they are used (ops.py)."""

from __future__ import annotations

from typing import Literal, Sequence

import torch

from sglang_ext.attention import attention_received
from sglang_ext.kernels.attention import frontier_attention, plan_tiles
from sglang_ext.kernels.gather import gather_unrotated
from sglang_ext.kernels.scatter import scatter_rotated
from sglang_ext.kernels.score import map_and_score
from sglang_ext.phases import Phases
from sglang_ext.rope import Turn
from sglang_ext.transfer.maps import SideMap
from sglang_ext.worker.ops import Attention, Buffers, Write, seen_slots


class TritonOps:
    """KVOps on a CUDA device: one launch per layer for each operation (two for the map), whatever the number of
    prompts."""

    name: Literal["triton"] = "triton"

    def read(self, layers: Sequence[Buffers], slots: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = zip(*layers)
        return gather_unrotated(keys, values, slots, turn.table())

    def writer(self, turn: Turn, slots: torch.Tensor) -> Write:
        table = turn.table()

        def write(
            keys: torch.Tensor, values: torch.Tensor, key_buffer: torch.Tensor, value_buffer: torch.Tensor
        ) -> None:
            scatter_rotated(keys, values, table, slots, key_buffer, value_buffer)

        return write

    def map_side(self, side: SideMap, centred: torch.Tensor, scores: torch.Tensor, phases: Phases) -> torch.Tensor:
        """The score is part of the phase `map`: one kernel computes both."""
        with phases("map"):
            return map_and_score(centred, side.weight, side.prediction_mean, side.basis, scores, len(side.sources))

    def attention(self, positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], group: int) -> Attention:
        return _TritonAttention(positions, slots, group)


class _TritonAttention:
    """All prompts in one launch. What positions received is rarely asked for, and stays torch's."""

    def __init__(self, positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], group: int) -> None:
        self._counts = [len(own) for own in positions]
        self._seen = seen_slots(positions, slots)
        # A stretch of every n-th position may be a view, which the plan does not take.
        self._plan = plan_tiles([own.contiguous() for own in positions], self._seen, group)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        received: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        if received is not None:
            prompts = zip(query.split(self._counts), self._plan.positions.split(self._counts), self._seen)
            received += [
                attention_received(rows, own, keys.index_select(0, seen), scale) for rows, own, seen in prompts
            ]
        return frontier_attention(query, keys, values, self._plan, scale)
