"""Messages between the HTTP process and the scheduler. Handles travel here, never KV bytes."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from sglang.srt.managers import io_struct
from sglang.srt.managers.io_struct import BaseReq

ALWAYS = "always"
"""`LiftReq.when`: lift in any case. Otherwise only where that is expected to be faster than a native prefill."""


class ExportReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Publish the KV of the longest cached prefix of `ids` that is native under `cache_salt`.

    attention: with what its tokens received of the model's attention; documents: keys of those that are linked in it,
    whose KV lies in a namespace of its own.
    """

    ids: List[int]
    cache_salt: Optional[str] = None
    attention: bool = False
    documents: List[str] = []
    recompute: int = 0
    rho: float = 0.0


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


class CompileReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Compile a document's tokens by `method`, and keep the block under `key`; publish: and put it in shared memory."""

    key: str
    ids: List[int]
    method: str
    publish: bool = False


class MapReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Map the block behind `handle`, another model's of the document `ids`, through a pack, and keep it under `key`."""

    key: str
    ids: List[int]
    handle: str
    pack: str


class LinkReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Link the prompt `ids` with the documents of these keys, in the order in which they stand.

    handles: blocks, by key, of documents that the scheduler does not hold, and contents: the tokens that they are of;
    recompute: leading tokens of each document that are computed as well; rho: the share of a mapped one's.
    """

    ids: List[int]
    documents: List[str]
    handles: Dict[str, str]
    contents: Dict[str, List[int]]
    recompute: int = 0
    rho: float
    extra_key: Optional[str] = None
    cache_salt: Optional[str] = None
    lease_s: float


class ForgetReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Drop the block under `key`."""

    key: str


class ReleaseReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Give up the lease, the queued or open job, or the block compiled, of the request `lease`."""

    lease: str


class CountersReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Say what the scheduler has counted since it started."""


class HeldReq(BaseReq, tag=True, kw_only=True, array_like=True):
    """Say what is held for work under way."""


class KVReply(BaseReq, tag=True, kw_only=True, array_like=True):
    """The scheduler's answer to one of the above, with the rid of the question."""

    body: Dict[str, Any]


def register() -> None:
    """Teaches SGLang's wire format these types. Call once in every process that sends or receives them."""
    io_struct.hook_custom_types(
        ExportReq, LiftReq, CompileReq, MapReq, LinkReq, ForgetReq, ReleaseReq, CountersReq, HeldReq, KVReply
    )
