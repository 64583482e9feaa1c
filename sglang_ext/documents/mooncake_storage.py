"""Documents in the memory of a whole fleet: a Mooncake store, joined through SGLang's backend for it."""

from __future__ import annotations

import re
import socket
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Iterable, Iterator, Self
from urllib.parse import parse_qs, urlsplit

import httpx
import torch

from sglang_ext.documents.storage import sglang_backend
from sglang_ext.errors import DocumentError

SCHEME = "mooncake"
_PORT, _ADMIN_PORT = 50051, 9003  # mooncake_master's own defaults
_ABSENT = -704
_CONNECT_S = 2.0


@dataclass(frozen=True)
class Master:
    """Where a store's master listens: `mooncake://HOST:PORT?admin=PORT`."""

    host: str
    port: int
    admin_port: int

    @classmethod
    def parse(cls, url: str) -> Self:
        """Raises DocumentError."""
        error = DocumentError(
            f"{url!r} is no Mooncake store; expected {SCHEME}://HOST:PORT, or with the master's admin port "
            f"{SCHEME}://HOST:PORT?admin={_ADMIN_PORT}"
        )
        try:
            parts = urlsplit(url)
            more = parse_qs(parts.query)
            admin_port = int(more.pop("admin", [str(_ADMIN_PORT)])[-1])
            port = parts.port or _PORT
        except ValueError:
            raise error from None
        if parts.scheme != SCHEME or not parts.hostname or parts.path.strip("/") or more:
            raise error
        return cls(parts.hostname, port, admin_port)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class MooncakeStorage:
    """A store that every worker of a fleet shares. Each gives a part of its memory to it; the master bounds the whole.

    SGLang's backend stores pages of a host pool; whole objects go to the client that it has set up. Listing is the
    master's: its admin port tells all names. A master that does not answer makes every call a failed one, and
    documents are compiled again.
    """

    def __init__(self, master: Master, host: str, protocol: str, device: str, segment_bytes: int) -> None:
        """host: where other workers reach this one; segment_bytes: memory that it gives. Raises DocumentError."""
        self.failed = 0
        try:
            socket.create_connection((master.host, master.port), _CONNECT_S).close()  # the library tries for minutes
            where = {
                "master_server_address": str(master), "master_metrics_port": master.admin_port,
                "metadata_server": "P2PHANDSHAKE", "local_hostname": host, "protocol": protocol, "device_name": device,
                "global_segment_size": segment_bytes,
            }  # fmt: skip
            self._client = sglang_backend(SCHEME, where).store
        except (OSError, RuntimeError, ImportError) as error:
            raise DocumentError(
                f"the Mooncake store at {master} cannot be joined: {error}; start mooncake_master there, or name a folder"
            ) from error
        self._names_url = f"http://{master.host}:{master.admin_port}/get_all_keys"

    def read(self, name: str) -> bytes | None:
        size = self._client.get_size(name)
        if size < 0:
            self.failed += size != _ABSENT
            return None
        whole = torch.empty(size, dtype=torch.uint8)
        with _registered(self._client, whole):
            got = self._client.get_into(name, whole.data_ptr(), size)
        if got != size:
            self.failed += got != _ABSENT
            return None
        return whole.numpy().tobytes()

    def write(self, name: str, data: bytes | memoryview) -> bool:
        whole = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with _registered(self._client, whole):
            taken = self._client.upsert_from(name, whole.data_ptr(), whole.numel()) == 0
        self.failed += not taken
        return taken

    def delete(self, name: str) -> None:
        # By force: else what was read a moment ago stays.
        self.failed += self._client.remove(name, True) not in (0, _ABSENT)

    def delete_all(self, prefix: str) -> None:
        self.failed += self._client.remove_by_regex(f"^{re.escape(prefix)}.*", True) < 0

    def names(self) -> Iterable[str]:
        try:
            reply = httpx.get(self._names_url, timeout=_CONNECT_S).raise_for_status()
        except httpx.HTTPError:
            self.failed += 1
            return ()
        return reply.text.split()


@contextmanager
def _registered(client: Any, buffer: torch.Tensor) -> Iterator[None]:
    """Inside the block the store's client may read and write that memory."""
    client.register_buffer(buffer.data_ptr(), buffer.numel())
    try:
        yield
    finally:
        client.unregister_buffer(buffer.data_ptr())
