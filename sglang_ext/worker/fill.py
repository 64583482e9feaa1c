"""Writes blocks into slots of this worker's pool: another model's through a pack's maps, its own as they are."""

from __future__ import annotations

from typing import Iterator, NamedTuple, Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.worker.ops import KVOps
from sglang_ext.worker.pool import Pool


class Piece(NamedTuple):
    """A block of this model that goes to positions start, start + 1, ..., and the slots of these: int64 [n]."""

    block: KVBlock
    start: int
    slots: torch.Tensor


class Filler:
    """Fills slots of one pool with KV, rotated to its positions."""

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

    def own_layers(self, pieces: Sequence[Piece], phases: Phases) -> Iterator[None]:
        """Writes blocks of this model, a layer per step (SemPIC, equation 3). Adds to the phase `write`."""
        writes = []
        for piece in pieces:
            positions = torch.arange(piece.start, piece.start + len(piece.block), device=self._pool.device)
            writes.append(self._ops.writer(self._rotation.at(positions), piece.slots))
        for layer, buffers in enumerate(self._pool.buffers):
            with phases("write"):
                for piece, write in zip(pieces, writes, strict=True):
                    write(piece.block.keys[layer], piece.block.values[layer].float(), *buffers)
            yield
