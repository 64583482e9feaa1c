"""A bounded map that forgets what was used longest ago."""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Callable, Generic, Hashable, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SizedLRU(Generic[K, V]):
    """Values whose sizes add up to at most `limit`, in whatever unit `size_of` counts. Any thread may call."""

    def __init__(self, limit: int, size_of: Callable[[V], int]) -> None:
        self.limit = limit
        self.size = 0
        self._size_of = size_of
        self._held: OrderedDict[K, V] = OrderedDict()
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: K) -> bool:
        """Whether the value is here. No use of it."""
        return key in self._held

    def get(self, key: K) -> V | None:
        """The value, which is now the one used last."""
        with self._lock:
            value = self._held.get(key)
            if value is not None:
                self._held.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Takes the value in, in the place of one under the same key, and forgets others until all fit.

        A value that is over the limit by itself is not kept, and makes no other one go.
        """
        size = self._size_of(value)
        with self._lock:
            self.drop(key)
            if size > self.limit:
                return
            while self.size + size > self.limit:
                self.drop(next(iter(self._held)))
            self._held[key] = value
            self.size += size

    def drop(self, key: K) -> None:
        """Forgets the value. Harmless where it is not here."""
        with self._lock:
            value = self._held.pop(key, None)
            if value is not None:
                self.size -= self._size_of(value)

    def values(self) -> list[V]:
        """All of them, the one used longest ago first. No use of them."""
        with self._lock:
            return list(self._held.values())
