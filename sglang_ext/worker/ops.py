"""What a worker computes on KV tensors beside its model: the one place where torch or Triton is chosen."""

from __future__ import annotations

from typing import Literal, Protocol, Sequence

import torch

from sglang_ext.attention import attention_received, frontier_attention
from sglang_ext.phases import Phases
from sglang_ext.rope import Turn
from sglang_ext.transfer.maps import SideMap, map_and_score

Buffers = tuple[torch.Tensor, torch.Tensor]
"""One layer of a pool: keys (rotated) and values, [slots, kv_heads, head_dim] each."""


class Attention(Protocol):
    """Frontier-causal attention of one forward over a pool; what its layers have in common is worked out once."""

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        received: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One layer's attention, each position over its own prompt's entries up to itself.

        query: [S, query_heads, head_dim], the prompts' positions back to back; keys, values: the layer's
        buffers. Returns [S, query_heads, head_dim] in the query's dtype. `received`, where given, gets the
        attention that each prompt's positions received (attention.py): float32 [n_b] per prompt.
        """


class Write(Protocol):
    """Writes one layer's position-free entries into a pool."""

    def __call__(
        self, keys: torch.Tensor, values: torch.Tensor, key_buffer: torch.Tensor, value_buffer: torch.Tensor
    ) -> None:
        """keys, values: float32 [n, kv_heads, head_dim]. Mutates the layer's buffers, at the writer's slots alone."""


class KVOps(Protocol):
    """The operations, over plain tensors on one device. Every implementation equals TorchOps up to rounding."""

    @property
    def name(self) -> Literal["torch", "triton"]:
        """What /kv/capabilities says of this worker."""

    def read(self, layers: Sequence[Buffers], slots: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        """Position-free keys, float32, and values, in the pool's dtype: [layers, n, kv_heads, head_dim] each.

        slots: int64 [n]; turn: the rotation to the positions that they hold. Nothing is mutated.
        """

    def writer(self, turn: Turn, slots: torch.Tensor) -> Write:
        """Rotates and writes entries to int64 `slots` [n], all different, for any number of layers."""

    def map_side(self, side: SideMap, centred: torch.Tensor, scores: torch.Tensor, phases: Phases) -> torch.Tensor:
        """One step of CrossModelMap.predict, as `map_and_score` is."""

    def attention(self, positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], group: int) -> Attention:
        """positions: per prompt int64 [S_b], at least one, on the host, ascending; slots: per prompt int64, of
        every position up to the last computed one at least; group: query heads per KV head."""


class TorchOps:
    """torch's, on any device."""

    name: Literal["torch"] = "torch"

    def read(self, layers: Sequence[Buffers], slots: torch.Tensor, turn: Turn) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (_gathered(buffers, slots) for buffers in zip(*layers))
        return turn.unrotate(keys), values

    def writer(self, turn: Turn, slots: torch.Tensor) -> Write:
        def write(
            keys: torch.Tensor, values: torch.Tensor, key_buffer: torch.Tensor, value_buffer: torch.Tensor
        ) -> None:
            key_buffer[slots] = turn.rotate(keys).to(key_buffer.dtype)
            value_buffer[slots] = values.to(value_buffer.dtype)

        return write

    def map_side(self, side: SideMap, centred: torch.Tensor, scores: torch.Tensor, phases: Phases) -> torch.Tensor:
        return map_and_score(side, centred, scores, phases)

    def attention(self, positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], group: int) -> Attention:
        return _TorchAttention(positions, slots)


class _TorchAttention:
    """Gathers each prompt's entries and attends over them. Frontiers are read off the positions on the host, so
    that no layer waits for the device."""

    def __init__(self, positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        self._positions = positions
        self._counts = [len(own) for own in positions]
        self._on_device = torch.cat(list(positions)).to(slots[0].device).split(self._counts)
        self._seen = seen_slots(positions, slots)

    def __call__(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        received: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        mixed = []
        prompts = zip(query.split(self._counts), self._positions, self._on_device, self._seen)
        for rows, own, on_device, seen in prompts:
            entries = keys.index_select(0, seen)
            mixed.append(
                frontier_attention(rows, own, entries, values.index_select(0, seen), scale, on_device=on_device)
            )
            if received is not None:
                received.append(attention_received(rows, on_device, entries, scale))
        return torch.cat(mixed)


def seen_slots(positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Each prompt's slots up to its last computed position."""
    return [held[: int(own[-1]) + 1] for own, held in zip(positions, slots)]


def ops_on(device: torch.device, kernels: bool) -> KVOps:
    """Triton's for a pool on a CUDA device, unless the worker was told to do without `kernels`; else torch's."""
    if kernels and device.type == "cuda":
        from sglang_ext.worker.triton_ops import TritonOps

        return TritonOps()
    return TorchOps()


def _gathered(buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """[layers, n, kv_heads, head_dim]"""
    first = buffers[0]
    out = first.new_empty(len(buffers), len(slots), *first.shape[1:])
    for layer, buffer in enumerate(buffers):
        torch.index_select(buffer, 0, slots, out=out[layer])
    return out
