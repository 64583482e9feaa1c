"""The cross-model KV headers of vLLM's semantic router: where a prompt's KV is, told by whoever chose the model.

They are hints: what they say is used only where it names a worker and a pack of this router's own config, and
nothing else is ever asked. `x-vsr-kv-cache-id` is taken and not used: a worker finds KV by the prompt's tokens under
the caller's own salt, and an id from outside could name another tenant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from router.worker import Worker

_SOURCE, _CACHE, _MAPPER = "x-vsr-kv-source-pod", "x-vsr-kv-cache-id", "x-vsr-kv-mapper-id"
STATUS_HEADER = "x-vsr-kv-transfer-status"
_STATUS = {"applied": "applied", "fallback_prefill": "fallback_reprefill"}


class Hints(NamedTuple):
    """What the headers of one request say; None for one that is absent or empty."""

    source: str | None  # the worker that holds the KV: a tier's name, or a worker's name or address
    pack: str | None  # the map to use: a pack's name or digest, as in the config

    @classmethod
    def read(cls, headers: Mapping[str, str]) -> Hints | None:
        """None where none of the three headers was sent. The names in `headers` are in lower case."""
        if not any(name in headers for name in (_SOURCE, _CACHE, _MAPPER)):
            return None
        return cls(headers.get(_SOURCE, "").strip() or None, headers.get(_MAPPER, "").strip() or None)

    def is_of(self, worker: Worker) -> bool:
        """True where the source is this worker; a pod may be told by host and port alone."""
        named = (worker.name, worker.tier.name, worker.address, worker.address.partition("://")[2])
        return self.source is not None and self.source.rstrip("/") in named

    def allow(self, pack: str) -> bool:
        """True where the hints leave the choice of the pack, or name this one."""
        return self.pack in (None, pack)


def transfer_status(lift_status: str | None) -> str:
    """What became of the hints, in the words of the other router; None: they led to no lift."""
    return _STATUS.get(lift_status or "", "unsupported")
