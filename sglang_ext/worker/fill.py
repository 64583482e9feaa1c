"""Writes a source block through a pack's maps into slots of this worker's pool."""

from __future__ import annotations

from typing import Iterator

import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.worker.ops import KVOps
from sglang_ext.worker.pool import Pool


class Filler:
    """Fills slots of one pool with mapped KV, rotated to its positions."""

    def __init__(self, pool: Pool, geometry: KVGeometry, ops: KVOps) -> None:
        self._pool = pool
        self._geometry = geometry
        self._ops = ops
        self._rotation = Rotation(geometry.rope, pool.device)

    def layers(
        self, maps: CrossModelMap, span: KVBlock, start: int, slots: torch.Tensor, phases: Phases
    ) -> Iterator[torch.Tensor]:
        """Maps the whole span, a layer per step, and writes its positions from `start` on into `slots`.

        slots: int64 [len(span) - start]. Yields each layer's disagreement for all of the span, float32 [n].
        Adds to the phases `gather`, `map`, `score` and `write`.
        """
        shape = (len(span) - start, self._geometry.kv_heads, self._geometry.head_dim)
        turn = self._rotation.at(torch.arange(start, len(span), device=self._pool.device))
        buffers, write = self._pool.buffers, self._ops.writer(turn, slots)
        for layer, keys, values, outside in maps.predict(span, phases, self._ops.map_side):
            with phases("write"):
                write(keys[start:].view(shape), values[start:].view(shape), *buffers[layer])
            yield outside
