"""Messages between the HTTP process and the scheduler. Handles travel here, never KV bytes."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BaseReq

ALWAYS = "always"
"""`LiftReq.when`: lift in any case. Otherwise only where that is expected to be faster than a native prefill."""


class ExportReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Publish the KV of the longest cached prefix of `ids` that is native under `cache_salt`.

    attention: with what its tokens received of the model's attention.
    """

    ids: List[int]
    cache_salt: Optional[str] = None
    attention: bool = False


class LiftReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Lift the block behind `handle` to the prompt `ids`, under `namespace`."""

    ids: List[int]
    handle: str
    pack: str
    rho: float
    coverage: Optional[float] = None
    selector: str
    when: str
    namespace: str
    cache_salt: Optional[str] = None
    lease_s: float
    explain: bool = False


class ReleaseReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Give up the lease, or the queued or open lift, of the request `lease`."""

    lease: str


class CountersReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Say what the scheduler has counted since it started."""


class KVReply(BaseReq, tag=True, kw_only=True, array_like=True):
    """The scheduler's answer to one of the above, with the rid of the question."""

    body: Dict[str, Any]


def register() -> None:
    """Teaches SGLang's wire format these types. Call once in every process that sends or receives them."""
    io_struct.hook_custom_types(ExportReq, LiftReq, ReleaseReq, CountersReq, KVReply)
