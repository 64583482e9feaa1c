"""The carriers that a worker has, and which of them a block takes."""

from __future__ import annotations

from typing import Sequence

from sglang_ext.errors import TransferError
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport.base import Carrier
from sglang_ext.worker.transport.shared_memory import SameHost, SharedMemory


class Carriers:
    """All carriers of one worker, the best first. Belongs to the HTTP process."""

    def __init__(self, memory: SharedMemory, carriers: Sequence[Carrier]) -> None:
        self._memory = memory
        self._by_name = {carrier.name: carrier for carrier in carriers}

    @classmethod
    def started(cls, memory: SharedMemory, settings: WorkerSettings) -> Carriers:
        """Those that the settings name. Raises WorkerError where one cannot start."""
        carriers: list[Carrier] = []
        if settings.kv_transport != "mooncake":
            carriers.append(SameHost(memory))
        if settings.kv_transport != "shm":
            from sglang_ext.worker.transport.engine import Engine
            from sglang_ext.worker.transport.mooncake import Mooncake

            engine = Engine(
                settings.kv_host or "", settings.kv_protocol, settings.kv_device, settings.kv_buffer_bytes,
                settings.transfer_timeout_s,
            )  # fmt: skip
            carriers.append(Mooncake(memory, engine))
        return cls(memory, carriers)

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    @property
    def held_bytes(self) -> int:
        """Bytes that blocks on their way hold beside shared memory."""
        return sum(carrier.held_bytes for carrier in self._by_name.values())

    @property
    def place(self) -> str:
        """Names this host's shared memory, for the other worker to compare."""
        return self._memory.place

    def named(self, name: str) -> Carrier:
        """The carrier that the source has chosen. Raises TransferError where this worker lacks it."""
        if name not in self._by_name:
            raise TransferError(f"the source offers its block through {name!r}; this worker takes {self.names}")
        return self._by_name[name]

    def shared_with(self, names: Sequence[str], place: str | None) -> Carrier:
        """The first carrier that a reader has too. Raises TransferError where there is none.

        place: names the reader's shared memory; None where it says that it sees this one.
        """
        for carrier in self._by_name.values():
            if carrier.name in names and (carrier.remote or place in (None, self.place)):
                return carrier
        where = "the same" if place in (None, self.place) else "another"
        raise TransferError(
            f"no common transport: the source has {self.names}, the target {list(names)}, on {where} host; "
            "between hosts both need --kv-transport mooncake or auto"
        )

    def drop(self, handle: str) -> None:
        """Frees what an offered handle holds. Raises TransferError for anything but a handle of these carriers."""
        for carrier in self._by_name.values():
            if carrier.owns(handle):
                return carrier.drop(handle)
        raise TransferError(f"{handle[:200]!r} is not a block handle of {self.names}")
