"""How a block gets from one worker to another."""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Protocol

from sglang_ext.block import KVBlock
from sglang_ext.errors import TransferError

_HANDLE = re.compile(r"kvlift-(\d+)-[0-9a-f]{32}")


class Transport(Protocol):
    """Publishes blocks under handles. A handle is small, safe to send, and good for one fetch."""

    name: str

    def publish(self, block: KVBlock) -> str: ...

    def fetch(self, handle: str) -> KVBlock:
        """The block; the handle is spent. Raises TransferError or BlockError."""
        ...

    def drop(self, handle: str) -> None:
        """Frees what the handle holds. Harmless where it is spent."""
        ...


class SharedMemory:
    """Blocks as files in a memory file system that both workers of one host see.

    The reader unlinks a block once it has mapped it, so that nothing is left when it dies later. Who
    publishes must `drop` what was not fetched in time; what a dead writer left, `sweep` frees.
    """

    name = "shm"

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._max_bytes = max_bytes
        self._folder = folder or Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")

    def publish(self, block: KVBlock) -> str:
        """Writes the block. Raises TransferError for one over the limit, or where memory is short."""
        if block.nbytes > self._max_bytes:
            raise TransferError(f"the block has {block.nbytes} bytes, over the limit of {self._max_bytes}")
        handle = f"kvlift-{os.getpid()}-{uuid.uuid4().hex}"
        try:
            block.save(self._folder / handle)
        except OSError as error:
            self.drop(handle)
            raise TransferError(f"the block cannot be written to {self._folder}: {error.strerror}") from error
        return handle

    def fetch(self, handle: str) -> KVBlock:
        path = self._path(handle)
        if not path.exists():
            raise TransferError(f"the block {handle} is gone: its worker died, or it was fetched or released")
        try:
            return KVBlock.load(path)
        finally:
            path.unlink(missing_ok=True)

    def drop(self, handle: str) -> None:
        self._path(handle).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Frees the blocks of writers that are dead; returns how many."""
        freed = 0
        for path in self._folder.glob("kvlift-*"):
            match = _HANDLE.fullmatch(path.name)
            if match is not None and not os.path.exists(f"/proc/{match[1]}"):
                path.unlink(missing_ok=True)
                freed += 1
        return freed

    def _path(self, handle: str) -> Path:
        # The handle comes over HTTP: nothing but a name of our own form becomes a path.
        if _HANDLE.fullmatch(handle) is None:
            raise TransferError(f"{handle!r} is not a block handle")
        return self._folder / handle
