"""Mooncake's TransferEngine with one registered buffer: reads of another host's memory, over RDMA or TCP.

The library is imported when an engine is started, never before.
"""

from __future__ import annotations

import asyncio
import ctypes
import math
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang_ext.errors import TransferError, WorkerError

RDMA_DEVICES = Path("/sys/class/infiniband")
_RUNNING = (0, -2)  # under way; under way and later than the engine likes
_COMPLETED = 1
_LONGEST_PAUSE_S = 0.02


def require_library(protocol: str, device: str) -> type[Any]:
    """Mooncake's TransferEngine class. Raises WorkerError where it or the RDMA device is missing."""
    try:
        from mooncake.engine import TransferEngine
    except ImportError as error:
        raise WorkerError(
            f"Mooncake cannot be loaded ({error}): install kvlift[mooncake] and Debian's package libibverbs1, "
            "or use --kv-transport shm"
        ) from error
    if protocol == "rdma":
        found = sorted(path.name for path in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
        missing = [name for name in device.split(",") if name and name not in found]
        if missing or not found:  # the library would go on over TCP
            raise WorkerError(
                f"no RDMA device {device or 'at all'}; this host has {found or 'none'}: use --kv-protocol tcp"
            )
    return TransferEngine


class Engine:
    """One engine and its buffer, in which each transfer begins and ends. Must be used on one event loop.

    Who reaches `session` over the network may read and write the whole buffer: Mooncake asks for no password.
    """

    def __init__(self, host: str, protocol: str, device: str, nbytes: int, timeout_s: float) -> None:
        """host: the address that other workers reach this one at. Raises WorkerError where it cannot start.

        timeout_s: a read over TCP that makes no progress for so long ends, so that its part of the buffer is free again.
        """
        library = require_library(protocol, device)
        # Read by the library; what an operator has set stays.
        os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(math.ceil(timeout_s)))
        if protocol == "tcp":
            os.environ["MC_FORCE_TCP"] = "1"  # else it takes RDMA where there is a device
        self._engine = library()
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
            raise WorkerError(
                f"Mooncake cannot listen as {host!r} over {protocol}; its reason is in this process's log"
            )
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        memory = mmap.mmap(-1, nbytes)
        self.buffer = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._engine.register_memory(self.address, nbytes) != 0:
            raise WorkerError(
                f"Mooncake cannot register a buffer of {nbytes} bytes: for RDMA, look at `ulimit -l`, or give a smaller "
                "--kv-buffer-bytes"
            )
        # It connects under a lock of its own, and waits there for a peer that does not answer.
        self._connecting = ThreadPoolExecutor(1, "kvlift-mooncake")

    async def read(self, session: str, address: int, offset: int, length: int) -> None:
        """Reads a peer's memory into this buffer at `offset`. Raises TransferError.

        Ends only once nothing writes there any more: give up waiting for it, but keep the part until then.
        """
        lists = [self.address + offset], [address], [length]
        submit = self._engine.batch_transfer_async_read
        batch = await asyncio.get_running_loop().run_in_executor(self._connecting, submit, session, *lists)
        if batch == 0:
            raise TransferError(f"the source's transfer engine at {session} cannot be reached")
        started = time.monotonic()
        while (status := self._engine.transfer_check_status(batch)) in _RUNNING:
            # A twentieth of what it took so far: the wait adds little to a short transfer, and polls a long one rarely.
            await asyncio.sleep(min(_LONGEST_PAUSE_S, (time.monotonic() - started) / 20))
        if status != _COMPLETED:
            raise TransferError(f"the transfer from {session} broke off: the source died, or has let go of the block")
