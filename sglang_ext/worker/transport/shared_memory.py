"""Blocks as files in a memory file system, between the processes of one host."""

from __future__ import annotations

import os
import re
import uuid
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, Callable

from sglang_ext.block import KVBlock
from sglang_ext.errors import TransferError

_HANDLE = re.compile(r"kvlift-(\d+)-[0-9a-f]{32}")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class SharedMemory:
    """A transport: blocks as files in a memory file system that both workers of one host see.

    The reader unlinks a block once it has mapped it, so that nothing is left when it dies later. Who
    publishes must `drop` what was not fetched in time; what a dead writer left, `sweep` frees.
    """

    def __init__(self, max_bytes: int, folder: Path | None = None) -> None:
        self._max_bytes = max_bytes
        self._folder = folder or Path("/dev/shm" if os.path.isdir("/dev/shm") else "/tmp")

    @cached_property
    def place(self) -> str:
        """Names this memory file system: equal for two workers exactly where both see the same one."""
        boot = _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename
        return f"{boot}:{os.stat(self._folder).st_dev}"

    def publish(self, block: KVBlock, rid: str | None = None) -> str:
        """Writes the block. Raises TransferError for one over the limit, or where memory is short.

        rid: of the request that it answers (`new_rid`), by which `withdraw` frees it.
        """
        if block.nbytes > self._max_bytes:
            raise TransferError(f"the block has {block.nbytes} bytes, over the limit of {self._max_bytes}")
        return self._write(block.save, rid)

    def withdraw(self, rid: str) -> None:
        """Frees the block that this process published for a request. Harmless where there is none."""
        handle = _handle(rid)
        if self.owns(handle):
            self.drop(handle)

    def publish_file(self, data: memoryview) -> str:
        """Publishes a block that is already in the form of its file. Raises TransferError where memory is short."""
        return self._write(lambda path: path.write_bytes(data))

    def fetch(self, handle: str) -> KVBlock:
        path = self._existing(handle)
        try:
            return KVBlock.load(path)
        finally:
            path.unlink(missing_ok=True)

    def take_file(self, handle: str) -> BinaryIO:
        """The file of a published block; the handle is spent. The memory is free once the file is closed."""
        path = self._existing(handle)
        try:
            return path.open("rb")
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

    def owns(self, handle: str) -> bool:
        """Whether the handle has the form of those that `publish` gives."""
        return _HANDLE.fullmatch(handle) is not None

    def _write(self, write: Callable[[Path], object], rid: str | None = None) -> str:
        handle = _handle(rid or uuid.uuid4().hex)
        try:
            write(self._folder / handle)
        except OSError as error:
            self.drop(handle)
            raise TransferError(f"the block cannot be written to {self._folder}: {error.strerror}") from error
        return handle

    def _existing(self, handle: str) -> Path:
        path = self._path(handle)
        if not path.exists():
            raise TransferError(f"the block {handle} is gone: its worker died, or it was fetched or released")
        return path

    def _path(self, handle: str) -> Path:
        # The handle comes over HTTP: nothing but a name of our own form becomes a path.
        if not self.owns(handle):
            raise TransferError(f"{handle!r} is not a block handle")
        return self._folder / handle


def _handle(name: str) -> str:
    return f"kvlift-{os.getpid()}-{name}"


class SameHost:
    """A carrier between workers that see the same shared memory: nothing needs to move."""

    name = "shm"
    remote = False
    held_bytes = 0

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory

    async def offer(self, local: str) -> str:
        return local

    async def collect(self, handle: str, timeout_s: float) -> str:
        return handle

    def drop(self, handle: str) -> None:
        self._memory.drop(handle)

    def owns(self, handle: str) -> bool:
        return self._memory.owns(handle)
