"""Short locks on lifted prefixes, until the request they were lifted for has its own."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any, Collection, Generic, Iterator, NamedTuple, Sequence, TypeVar

Kept = TypeVar("Kept")


class Asked(NamedTuple):
    """What a request of SGLang's asks for: a prompt, in a namespace or natively."""

    namespace: str | None
    ids: array[int]


class Leased(NamedTuple):
    """A published prefix: its namespace, which prompts lifted in the same way share, and its tokens, at least one."""

    namespace: str
    ids: array[int]

    @classmethod
    def of(cls, namespace: str, ids: Sequence[int]) -> Leased:
        return cls(namespace, array("q", ids))

    def is_for(self, asked: Asked) -> bool:
        """Whether the request continues this prefix."""
        if asked.namespace != self.namespace or len(asked.ids) < len(self.ids):
            return False
        last = len(self.ids) - 1  # tells most prompts apart without a copy
        return asked.ids[last] == self.ids[last] and asked.ids[: last + 1] == self.ids


@dataclass
class _Lease(Generic[Kept]):
    lock: Any
    leased: Leased
    taken: float
    deadline: float
    kept: Kept | None
    came: bool = False  # its request has been seen, in the waiting queue or in a batch


class Leases(Generic[Kept]):
    """Holds tree locks by lease name, and with each what its request will need. Expiry follows this process's monotonic
    clock."""

    def __init__(self, tree: Any) -> None:
        self._tree = tree
        self._held: dict[str, _Lease[Kept]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def take(self, name: str, node: Any, leased: Leased, seconds: float, kept: Kept | None = None) -> None:
        self.release(name)
        now = time.monotonic()
        self._held[name] = _Lease(self._tree.lock(node), leased, now, now + seconds, kept)

    def kept_for(self, asked: Asked) -> Iterator[Kept]:
        """What the leases for this request keep."""
        return (one.kept for one in self._held.values() if one.kept is not None and one.leased.is_for(asked))

    def younger(self, seconds: float) -> bool:
        """Whether a lease was taken less than so long ago, and its request has not left the waiting queue."""
        now = time.monotonic()
        return any(now - lease.taken < seconds for lease in self._held.values())

    def release(self, name: str) -> None:
        lease = self._held.pop(name, None)
        if lease is not None:
            self._tree.unlock(lease.lock)

    def release_all(self) -> None:
        for name in list(self._held):
            self.release(name)

    def arrived(self, batch: Collection[Asked]) -> None:
        """Takes note of requests that go into a batch: one whose grammar was compiled meanwhile never waited in the queue."""
        for lease in self._held.values():
            lease.came = lease.came or any(map(lease.leased.is_for, batch))

    def tick(self, waiting: Collection[Asked]) -> None:
        """Releases leases whose time is over, or whose request has left the waiting queue for a batch."""
        now = time.monotonic()
        for name, lease in list(self._held.items()):
            if any(map(lease.leased.is_for, waiting)):
                lease.came = True
            elif lease.came or now > lease.deadline:
                self.release(name)
