"""The two contracts: blocks under handles inside a host, and their way to another worker."""

from __future__ import annotations

from typing import Protocol

from sglang_ext.block import KVBlock


class Transport(Protocol):
    """Publishes blocks under handles. A handle is small, safe to send, and good for one fetch."""

    def publish(self, block: KVBlock, rid: str | None = None) -> str:
        """The handle of the block; `withdraw` frees it by the request's rid, too. Raises TransferError."""
        ...

    def withdraw(self, rid: str) -> None:
        """Frees what was published here for a request whose client got no handle. Harmless where nothing was."""
        ...

    def fetch(self, handle: str) -> KVBlock:
        """The block; the handle is spent. Raises TransferError or BlockError."""
        ...

    def drop(self, handle: str) -> None:
        """Frees what the handle holds. Harmless where it is spent."""
        ...


class Carrier(Protocol):
    """Takes blocks that are published in shared memory from the source worker's to the target worker's.

    remote: the bytes leave the source's host. The source then holds them until it drops its handle.
    """

    name: str
    remote: bool

    @property
    def held_bytes(self) -> int:
        """Bytes that it holds, beside shared memory, for blocks on their way."""
        ...

    async def offer(self, local: str) -> str:
        """At the source: a handle for other workers, in exchange for the one in shared memory.

        Raises TransferError where there is no room; the block is freed then.
        """
        ...

    async def collect(self, handle: str, timeout_s: float) -> str:
        """At the target: the block's handle in its own shared memory.

        Raises TransferError where it does not come in time, BlockError where it was changed on its way.
        """
        ...

    def drop(self, handle: str) -> None:
        """At the source: frees what an offered handle holds. Harmless where that is spent."""
        ...

    def owns(self, handle: str) -> bool:
        """Whether the handle has this carrier's form."""
        ...
