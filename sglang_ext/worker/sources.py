"""Other workers, as where a prompt's KV comes from."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import BaseModel, ValidationError, model_validator

from sglang_ext.errors import TransferError
from sglang_ext.phases import Phases
from sglang_ext.worker import spans
from sglang_ext.worker.bodies import NO_DOCUMENTS, LinkedDocuments, Source
from sglang_ext.worker.transport import Carrier, Carriers

logger = logging.getLogger(__name__)

_RELEASE_S = 5.0


class _Exported(BaseModel):
    """The answer to /kv/export, as far as it is needed here."""

    tokens: int
    reason: str | None = None
    transport: str = ""
    handle: str | None = None
    ms: dict[str, float] = {}

    @model_validator(mode="after")
    def _tokens_have_a_handle(self) -> _Exported:
        if (self.tokens > 0) != (self.handle is not None):
            raise ValueError("a handle comes with tokens, and tokens with a handle")
        return self


@dataclass(frozen=True)
class Collected:
    """A source's block in this host's shared memory. Who has it drops the handle.

    ms: what the source and the way here took, by phase.
    """

    handle: str
    transport: str
    ms: dict[str, float]


class Sources:
    """Asks source workers for blocks, over one HTTP client, and brings them here."""

    def __init__(self, carriers: Carriers) -> None:
        self._carriers = carriers
        self._client: httpx.AsyncClient | None = None
        self._releases: set[asyncio.Task[None]] = set()

    async def collect(
        self, source: Source, ids: list[int], attention: bool, timeout_s: float, linked: LinkedDocuments = NO_DOCUMENTS
    ) -> Collected:
        """The block of the longest prefix of `ids` that the source holds. Raises TransferError or BlockError.

        The block waits at the source as long as the lift may take: many at once queue behind each other.
        """
        asked = {"attention": attention, **(linked._asdict() if linked.documents else {})}
        return await self._collect(source, ids, timeout_s, asked)

    async def document(self, source: Source, ids: list[int], timeout_s: float) -> Collected:
        """The block of the document `ids` by itself, which the source compiles. Raises TransferError or BlockError."""
        return await self._collect(source, ids, timeout_s, {"document": True})

    async def _collect(self, source: Source, ids: list[int], timeout_s: float, asked: dict[str, Any]) -> Collected:
        body = {
            "input_ids": ids, "cache_salt": source.cache_salt, "keep_s": timeout_s, **asked,
            "transports": self._carriers.names, "place": self._carriers.place,
        }  # fmt: skip
        reply = await self._post(source, "export", body)
        try:
            exported = _Exported.model_validate_json(reply.content)
        except ValidationError as error:
            first = error.errors()[0]
            raise TransferError(
                f"what {source.url} said is not an answer to /kv/export: {'.'.join(map(str, first['loc']))} {first['msg']}"
            ) from error
        if exported.handle is None:
            raise TransferError(exported.reason or "the source worker holds no KV of this prompt")
        carrier, phases = self._carriers.named(exported.transport), Phases()
        try:
            with phases("collect"):
                handle = await carrier.collect(exported.handle, timeout_s)
        finally:
            self._free_at(source, carrier, exported.handle)
        return Collected(handle, carrier.name, {**exported.ms, **phases.ms} if carrier.remote else exported.ms)

    def _free_at(self, source: Source, carrier: Carrier, handle: str) -> None:
        """Tells the source, beside all else, that its block is not needed any more."""
        if carrier.remote:
            release = asyncio.create_task(self._release(source, handle))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)

    async def _release(self, source: Source, handle: str) -> None:
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._post(source, "release", {"handle": handle})
        except (TransferError, TimeoutError) as error:
            logger.warning("kvlift: %s keeps a block until its time is over: %r", source.url, error)

    async def _post(self, source: Source, route: str, body: dict[str, Any]) -> httpx.Response:
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)
        key = {"authorization": f"Bearer {source.api_key}"} if source.api_key else {}
        try:
            reply = await self._client.post(
                f"{source.url.rstrip('/')}/kv/{route}", json=body, headers={**key, **spans.headers()}
            )
            reply.raise_for_status()
            return reply
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise TransferError(f"the source worker at {source.url} did not {route}: {error!r}") from error
