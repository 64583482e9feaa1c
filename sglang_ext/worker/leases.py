"""Short locks on lifted prefixes, until the request they were lifted for has its own."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Generic, Iterable, Iterator, TypeVar

Kept = TypeVar("Kept")


@dataclass
class _Lease(Generic[Kept]):
    lock: Any
    namespace: str
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

    def take(self, name: str, node: Any, namespace: str, seconds: float, kept: Kept | None = None) -> None:
        self.release(name)
        now = time.monotonic()
        self._held[name] = _Lease(self._tree.lock(node), namespace, now, now + seconds, kept)

    def kept(self, namespace: str) -> Iterator[Kept]:
        """What the leases in a namespace keep."""
        return (lease.kept for lease in self._held.values() if lease.namespace == namespace and lease.kept is not None)

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

    def arrived(self, namespaces: Iterable[str | None]) -> None:
        """Takes note of requests that go into a batch: one whose grammar was compiled meanwhile never waited in the queue."""
        batch = set(namespaces)
        for lease in self._held.values():
            lease.came = lease.came or lease.namespace in batch

    def tick(self, waiting_namespaces: Iterable[str]) -> None:
        """Releases leases whose time is over, or whose request has left the waiting queue for a batch."""
        waiting = set(waiting_namespaces)
        now = time.monotonic()
        for name, lease in list(self._held.items()):
            if lease.namespace in waiting:
                lease.came = True
            elif lease.came or now > lease.deadline:
                self.release(name)
