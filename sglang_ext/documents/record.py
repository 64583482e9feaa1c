"""What a document is, whichever model reads it, and the names of the KV that a model made of it.

A document's id is a digest of its content, so that every worker of a fleet gives it the same one. Its KV is named by
that id and by everything on which the numbers depend: what was stored for another model, adapter, rope or dtype is
never found, and so is a miss.
"""

from __future__ import annotations

import time
from typing import Literal, Sequence

import torch
from pydantic import BaseModel, ConfigDict

from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity, digest_fields

CompilerName = Literal["plain", "packet", "sempic", "joint"]
"""The names of the compilers (compilers.py, `Method`)."""

MethodName = Literal[CompilerName, "mapped"]
"""How a document's KV is made: by one of the compilers, or from another model's, through a pack."""

MAPPED: MethodName = "mapped"

ID_PREFIX = "doc-"
_ID_DIGITS = 32


class DocumentRecord(BaseModel):
    """One document.

    ids: the tokens of its text by itself; tenant: digest of the cache salt under which it was made; created, expires:
    seconds since 1970, `expires` None: never.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    method: MethodName
    text: str
    ids: tuple[int, ...]
    tenant: str
    created: float
    expires: float | None = None

    @classmethod
    def of(
        cls,
        text: str,
        ids: Sequence[int],
        method: MethodName,
        cache_salt: str | None,
        tokenizer: str,
        ttl: float | None,
    ) -> DocumentRecord:
        """tokenizer: its digest; ttl: seconds that the document lives, None: until it is deleted."""
        now = time.time()
        tenant = tenant_of(cache_salt)
        digest = digest_fields([tenant, method, tokenizer, *map(str, ids)])
        return cls(
            id=ID_PREFIX + digest[:_ID_DIGITS], method=method, text=text, ids=tuple(ids), tenant=tenant, created=now,
            expires=None if ttl is None else now + ttl,
        )  # fmt: skip

    @property
    def expired(self) -> bool:
        return self.expires is not None and time.time() >= self.expires

    @property
    def nbytes(self) -> int:
        """Of text and ids, about."""
        return len(self.text.encode()) + 8 * len(self.ids)


def tenant_of(cache_salt: str | None) -> str:
    """Digest of a salt; no salt is a tenant of its own."""
    return digest_fields([] if cache_salt is None else [cache_salt])


def block_key(
    record: DocumentRecord, identity: ModelIdentity, geometry: KVGeometry, dtype: torch.dtype, adapter: str | None
) -> str:
    """Names the document's KV in one model. adapter: digest of the Writer or envelope that compiles, None without."""
    fields = [record.id, identity.model, identity.tokenizer, repr(geometry), str(dtype), adapter or ""]
    return digest_fields(fields)
