"""One decode step of many rows at once: a single attention call per layer, however many rows there are.

Row by row, the Python around attention costs more than a small model's whole step.
"""

from __future__ import annotations

from typing import Protocol, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention


class Cache(Protocol):
    """What a slab reads and replaces of a row: keys and values [layers, capacity, kv_heads, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor
    length: int


class Slab:
    """The caches of n rows side by side: keys and values [layers, n, capacity, kv_heads, head_dim].

    Taking rows in replaces their tensors by views of the slab, with room for `spare` more tokens each, so that
    the rows go on growing in place.
    """

    def __init__(self, rows: Sequence[Cache], spare: int) -> None:
        self.rows = rows
        capacity = max(row.length for row in rows) + spare
        layers, _, *entry = rows[0].keys.shape
        # Zeros, because masked entries are multiplied too, and what an empty tensor holds may be NaN.
        self.keys = rows[0].keys.new_zeros(layers, len(rows), capacity, *entry)
        self.values = rows[0].values.new_zeros(layers, len(rows), capacity, *rows[0].values.shape[2:])
        for slot, row in enumerate(rows):
            self.keys[:, slot, : row.length] = row.keys[:, : row.length]
            self.values[:, slot, : row.length] = row.values[:, : row.length]
            row.keys, row.values = self.keys[:, slot], self.values[:, slot]


class DecodeStep:
    """The attention of one new token for each of a slab's rows in `slots`, ascending.

    `positions`: int64 [len(slots)], where those tokens stand: each row's length.
    """

    def __init__(self, slab: Slab, slots: Sequence[int]) -> None:
        self._slab = slab
        device = slab.keys.device
        self._slots = torch.tensor(slots, device=device)
        # While no row has left, the slab is read as it lies.
        self._whole = len(slots) == len(slab.rows)
        self.positions = torch.tensor([slab.rows[slot].length for slot in slots], device=device)
        self._end = int(self.positions.max()) + 1
        self._seen = (torch.arange(self._end, device=device) <= self.positions[:, None])[:, None, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes key and value [n, kv_heads, head_dim]; returns the output for query [n, query_heads, head_dim]."""
        slab, count, kv_heads = self._slab, len(query), key.shape[1]
        slab.keys[layer, self._slots, self.positions] = key
        slab.values[layer, self._slots, self.positions] = value
        mixed = scaled_dot_product_attention(
            query.view(count, kv_heads, -1, query.shape[-1]),
            self._read(slab.keys[layer], query.dtype),
            self._read(slab.values[layer], query.dtype),
            attn_mask=self._seen,
            scale=scale,
        )
        return mixed.reshape(count, query.shape[1], -1)

    def _read(self, side: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[n, kv_heads, T, head_dim] of the rows that take part."""
        entries = side[:, : self._end]
        return (entries if self._whole else entries[self._slots]).to(dtype).transpose(1, 2)
