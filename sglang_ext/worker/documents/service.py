"""The documents of one worker, in its HTTP process: named, found, and linked into prompts by the scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any, Callable, Sequence

from sglang_ext.documents.record import MAPPED, DocumentRecord, MethodName, tenant_of
from sglang_ext.documents.store import DocumentStore
from sglang_ext.errors import DocumentError, KVLiftError, UnknownDocument
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.transfer.pack import Manifest
from sglang_ext.worker.answers import Answer, fallback
from sglang_ext.worker.conversation import Conversation, new_rid
from sglang_ext.worker.counters import DocumentCounters
from sglang_ext.worker.documents.blocks import MEMORY, Blocks, Origin
from sglang_ext.worker.documents.bodies import DocumentBody, LinkBody, MapBody
from sglang_ext.worker.documents.linking import ABSENT
from sglang_ext.worker.messages import LinkReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.sources import Sources
from sglang_ext.worker.transport import SharedMemory


class Documents:
    """Knows what documents there are; the scheduler knows their KV."""

    def __init__(
        self,
        manager: Any,
        scheduler: Conversation,
        memory: SharedMemory,
        store: DocumentStore,
        identity: ModelIdentity,
        settings: WorkerSettings,
        sources: Sources,
        pack_named: Callable[[str | None], Manifest],
    ) -> None:
        """manager: SGLang's tokenizer manager; pack_named: one that may be used; raises PackError for another."""
        self.counters = DocumentCounters()
        self._manager = manager
        self._scheduler = scheduler
        self._memory = memory
        self._store = store
        self._identity = identity
        self._settings = settings
        self._pack_named = pack_named
        self._blocks = Blocks(scheduler, memory, store, identity, settings, sources)

    @property
    def methods(self) -> list[MethodName]:
        """By which this worker compiles; the last is the default."""
        return self._blocks.methods

    def find(self, document: str, cache_salt: str | None) -> DocumentRecord:
        """Raises UnknownDocument: another tenant's is as unknown as one that never was."""
        record = self._store.find(document, tenant_of(cache_salt))
        if record is None:
            raise UnknownDocument(f"no document {document!r}; it was never added, was deleted, or its time is over")
        return record

    def listed(self, cache_salt: str | None) -> list[DocumentRecord]:
        return self._store.listed(tenant_of(cache_salt))

    def named(self, text: str, method: MethodName | None, cache_salt: str | None) -> DocumentRecord:
        """The record that a text has, or would have: it is not taken into the store. Raises DocumentError."""
        return self._record(text, None, method, cache_salt, None)

    def known(self, record: DocumentRecord) -> bool:
        return self._store.find(record.id, record.tenant) is not None

    def put(self, record: DocumentRecord) -> DocumentRecord:
        return self._store.put(record)

    async def add(self, body: DocumentBody) -> tuple[DocumentRecord, Answer]:
        """Compiles a document and takes it in. Raises DocumentError, or TimeoutError."""
        record = self._record(body.text, body.ids, body.method, body.cache_salt, body.ttl)
        answer = await self._blocks.compile(record)
        return await asyncio.to_thread(self._store.put, record), answer

    async def map(self, body: MapBody) -> tuple[DocumentRecord, Answer]:
        """Takes in a document that another worker compiles, mapped. Raises KVLiftError, or TimeoutError."""
        record = self._record(body.text, body.ids, MAPPED, body.cache_salt, body.ttl)
        self._blocks.map_from(record, Origin(body.source, self._pack_named(body.pack).weights_sha256))
        answer = await self._blocks.compile(record)
        return await asyncio.to_thread(self._store.put, record), answer

    async def delete(self, record: DocumentRecord) -> None:
        await asyncio.to_thread(self._store.delete, record)
        self._blocks.forget(record)

    def keys(self, documents: Sequence[str], cache_salt: str | None) -> list[str]:
        """Of the KV of documents; none at all where one of them is unknown."""
        found = [self._store.find(document, tenant_of(cache_salt)) for document in documents]
        return [] if None in found else [self._blocks.key(record) for record in found if record is not None]

    async def published(self, ids: list[int], cache_salt: str | None) -> Answer:
        """Publishes the plain KV of a document, compiled where it is not yet. Raises as `add` does."""
        record = self._record(None, ids, "plain", cache_salt, None)
        phases = Phases()
        with phases("compile"):
            obtained = await self._blocks.obtain(record, before="nowhere")
        return {"tokens": len(ids), "handle": obtained.handle, "ms": phases.ms}

    def counted(self) -> dict[str, int]:
        """The counters' values."""
        kept = {"documents_broken": self._store.broken, "documents_storage_failed": self._store.storage_failed}
        return {**asdict(self.counters), **kept}

    async def link(self, body: LinkBody, records: Sequence[DocumentRecord]) -> tuple[Answer, list[str]]:
        """Links a prompt with documents, in their order; has those compiled whose KV is nowhere.

        records: what `body.documents` names. Returns the answer, `applied` or `fallback_prefill`, and where each
        document's KV came from: `memory`, `storage` or `compiled`.
        """
        by_key = {self._blocks.key(record): record for record in records}
        origins: dict[str, str] = {}
        rho = self._settings.rho if body.rho is None else body.rho
        message = LinkReq(
            rid=new_rid(), ids=body.input_ids, documents=[self._blocks.key(record) for record in records], handles={},
            contents={}, recompute=body.recompute, rho=rho, extra_key=body.extra_key, cache_salt=body.cache_salt,
            lease_s=self._settings.lease_s,
        )  # fmt: skip
        try:
            answer = await self._linked(message, by_key, origins)
        except KVLiftError as error:
            answer = fallback(str(error))
        except TimeoutError:
            self._give_up(message.rid)
            answer = fallback(f"linking took longer than {self._settings.documents_timeout_s} s")
        except asyncio.CancelledError:
            self._give_up(message.rid)
            raise
        finally:
            for handle in message.handles.values():
                self._memory.drop(handle)
        return answer, [origins.get(key, MEMORY) for key in message.documents]

    async def _linked(self, message: LinkReq, by_key: dict[str, DocumentRecord], origins: dict[str, str]) -> Answer:
        """Asks until the scheduler has all it needs; adds to the message's handles, and to `origins`."""
        while True:
            answer = await self._scheduler.ask(message, self._settings.documents_timeout_s)
            if answer["status"] != ABSENT:
                return answer
            if answer["broken"]:
                message.handles.clear()  # all of them are spent; what was whole is on the shelf
            for key in answer["broken"]:
                await asyncio.to_thread(self._store.drop_block, by_key[key], key)
            obtaining = (self._obtain(message, key, by_key[key], origins) for key in answer["absent"])
            failed = [error for error in await asyncio.gather(*obtaining, return_exceptions=True) if error is not None]
            if failed:
                raise failed[0]

    async def _obtain(self, message: LinkReq, key: str, record: DocumentRecord, origins: dict[str, str]) -> None:
        """Adds a document's handle to the message as soon as there is one: none is lost where this is cancelled."""
        got = await self._blocks.obtain(record, origins.get(key))
        origins[key] = got.origin
        if got.handle is not None:
            message.handles[key] = got.handle
            message.contents[key] = list(record.ids)

    def _record(
        self,
        text: str | None,
        ids: list[int] | None,
        method: MethodName | None,
        cache_salt: str | None,
        ttl: float | None,
    ) -> DocumentRecord:
        """Of a text or of token ids. Raises DocumentError."""
        tokenizer = self._manager.tokenizer
        tokens = tokenizer.encode(text, add_special_tokens=False) if ids is None else ids
        limit, words = self._manager.context_len, len(tokenizer)
        if not 0 < len(tokens) < limit:
            raise DocumentError(
                f"the document has {len(tokens)} tokens; expected 1 to {limit - 1}, this worker's context"
            )  # fmt: skip
        wrong = [one for one in tokens if not 0 <= one < words]
        if wrong:
            raise DocumentError(f"token {wrong[0]} is not one of this model's {words}")
        chosen = method or self.methods[-1]
        if chosen not in (*self.methods, MAPPED):
            raise DocumentError(
                f"this worker does not compile by {chosen!r}, but by {', '.join(self.methods)}; "
                "start it with --documents-adapter and an adapter made for its model"
            )
        told = tokenizer.decode(tokens) if text is None else text
        return DocumentRecord.of(told, tokens, chosen, cache_salt, self._identity.tokenizer, ttl)

    def _give_up(self, rid: str) -> None:
        self._scheduler.tell(ReleaseReq(rid=new_rid(), lease=rid))
