"""SGLang's radix tree, allocator and KV pool, as far as blocks need them."""

from __future__ import annotations

from array import array
from contextlib import contextmanager
from typing import Any, Iterator, NamedTuple, Sequence

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.errors import GeometryError, TransferError
from sglang_ext.geometry import KVGeometry
from sglang_ext.worker.ops import Buffers


class Where(NamedTuple):
    """A tree: native KV has no namespace, lifted KV has one and no salt (the namespace folds it in)."""

    namespace: str | None = None
    cache_salt: str | None = None


class Prefix(NamedTuple):
    """A cached prefix: its length, the node it ends at, and its slots int64 [length]."""

    length: int
    node: Any
    slots: torch.Tensor


class Pool:
    """One scheduler's tree and KV slots. Every method leaves the slot count balanced."""

    def __init__(self, scheduler: Any, geometry: KVGeometry) -> None:
        self.tree = scheduler.tree_cache
        self.page_size: int = scheduler.page_size
        self.capacity: int = scheduler.max_total_num_tokens
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._kv = self._allocator.get_kvcache()
        _check_layout(self._kv, geometry)

    @property
    def device(self) -> torch.device:
        return self._kv.get_key_buffer(0).device

    @property
    def dtype(self) -> torch.dtype:
        return self._kv.get_key_buffer(0).dtype

    @property
    def buffers(self) -> list[Buffers]:
        """Each layer's keys (rotated) and values, as they lie: what is written there is in the pool."""
        return [(self._kv.get_key_buffer(i), self._kv.get_value_buffer(i)) for i in range(self._kv.layer_num)]

    @property
    def nothing(self) -> Prefix:
        """The prefix of no length."""
        return Prefix(0, None, torch.empty(0, dtype=torch.int64, device=self.device))

    @property
    def used(self) -> int:
        """Slots that are neither free nor evictable: of running requests, of open jobs, and what leases lock."""
        return self.capacity - self._allocator.available_size() - self.tree.evictable_size()

    def page_floor(self, length: int) -> int:
        return length // self.page_size * self.page_size

    def page_ceil(self, length: int) -> int:
        return -(-length // self.page_size) * self.page_size

    def tail(self, length: int, end: int) -> int:
        """Positions of a prompt behind a prefix [0, end) that a job computes along with it: the rest, where that is no
        more than a page; a longer one is SGLang's to cut and to schedule."""
        return length - end if length - end <= self.page_size else 0

    def match(self, ids: Sequence[int], where: Where) -> Prefix:
        """The longest cached prefix of whole pages. Not locked: use it before anything is evicted."""
        result = self.tree.match_prefix(MatchPrefixParams(key=self._key(ids, where)))
        length = result.device_prefix_len
        if length == 0:
            return self.nothing
        slots = self.tree.path_device_indices(result.last_device_node)[:length]
        return Prefix(length, result.last_device_node, slots.to(torch.int64))

    @contextmanager
    def locked(self, *prefixes: Prefix) -> Iterator[None]:
        """Keeps prefixes from being evicted inside the block."""
        locks = [self.tree.lock(prefix.node) for prefix in prefixes if prefix.length]
        try:
            yield
        finally:
            for lock in locks:
                self.tree.unlock(lock)

    def allocate(self, count: int) -> torch.Tensor:
        """`count` free slots (whole pages), evicting unlocked entries. Raises TransferError when full."""
        self._allocator.evict_to_free_tokens(self.tree, count)
        slots = self._allocator.alloc(count)
        if slots is None:
            raise TransferError(f"the KV pool has no {count} free slots: running requests hold the rest")
        return slots.to(torch.int64)

    def free(self, slots: torch.Tensor) -> None:
        self._allocator.free(slots)

    @contextmanager
    def borrowed(self, count: int) -> Iterator[torch.Tensor]:
        """At least `count` slots for the length of the block, as `allocate` gives them."""
        slots = self.allocate(self.page_ceil(count))
        try:
            yield slots
        finally:
            self.free(slots)

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies the KV of slots `source` to slots `target`, in all layers."""
        for keys, values in self.buffers:
            keys[target] = keys[source]
            values[target] = values[source]

    def read(self, slots: torch.Tensor) -> list[Buffers]:
        """A copy of the KV of these slots, int64 [n], as it lies: by layer, keys and values [n, kv_heads, head_dim]."""
        return [(keys[slots], values[slots]) for keys, values in self.buffers]

    def write(self, slots: torch.Tensor, pieces: Sequence[Sequence[Buffers]]) -> None:
        """Writes what `read` gave of several pieces to slots, int64 [all their n], one piece after the other."""
        for (keys, values), *parts in zip(self.buffers, *pieces, strict=True):
            keys[slots] = torch.cat([part_keys for part_keys, _ in parts])
            values[slots] = torch.cat([part_values for _, part_values in parts])

    def insert(self, ids: Sequence[int], where: Where, held: Prefix, fresh: torch.Tensor) -> Any:
        """Puts `ids` into the tree: `held` already lies in it, `fresh` slots become the tree's.

        Where another insert was faster, the tree frees our copies. Returns the last node.
        """
        slots = torch.cat([held.slots, fresh])
        params = InsertParams(key=self._key(ids, where), value=slots, prev_prefix_len=held.length)
        return self.tree.insert(params).last_device_node

    def _key(self, ids: Sequence[int], where: Where) -> RadixKey:
        key = RadixKey(array("q", ids), where.namespace, cache_salt=where.cache_salt)
        return key.page_aligned(self.page_size)


def _check_layout(kv: Any, geometry: KVGeometry) -> None:
    if type(kv) is not MHATokenToKVPool:
        raise GeometryError(f"KV pool {type(kv).__name__} is not supported; expected MHATokenToKVPool")
    found = tuple(kv.get_key_buffer(0).shape[1:])
    if kv.layer_num != geometry.layers or found != (geometry.kv_heads, geometry.head_dim):
        raise GeometryError(
            f"the KV pool holds {kv.layer_num} layers of {found}, the model's configuration says "
            f"{geometry.layers} layers of {(geometry.kv_heads, geometry.head_dim)} (NHD layout)"
        )
    if kv.get_key_buffer(0).dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise GeometryError(f"KV dtype {kv.get_key_buffer(0).dtype} is not supported without scales")
