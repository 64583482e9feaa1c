"""The KV of documents, from the HTTP process: under which key it goes, and how it comes to the scheduler."""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import NamedTuple, Sequence

import torch

from sglang_ext.documents.record import MAPPED, DocumentRecord, MethodName, block_key
from sglang_ext.documents.store import DocumentStore
from sglang_ext.errors import DocumentError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.worker.answers import APPLIED, Answer
from sglang_ext.worker.bodies import Source
from sglang_ext.worker.conversation import Conversation, new_rid, scheduler_info
from sglang_ext.worker.handover import unless_given_up
from sglang_ext.worker.messages import CompileReq, ForgetReq, MapReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.sources import Sources
from sglang_ext.worker.transport import SharedMemory

MEMORY, STORAGE, COMPILED = "memory", "storage", "compiled"
"""Where a document's KV came from."""


class Origin(NamedTuple):
    """Where a mapped document comes from: the worker that compiles it, and the digest of the pack."""

    source: Source
    pack: str


class Obtained(NamedTuple):
    """KV on its way to the scheduler. handle: its block in shared memory, None where the scheduler has it already."""

    handle: str | None
    origin: str


class Blocks:
    """Of one worker's documents."""

    def __init__(
        self,
        scheduler: Conversation,
        memory: SharedMemory,
        store: DocumentStore,
        identity: ModelIdentity,
        settings: WorkerSettings,
        sources: Sources,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._store = store
        self._identity = identity
        self._stores = settings.documents_store is not None
        self._timeout_s = settings.documents_timeout_s
        self._sources = sources
        self._mapped: dict[str, Origin] = {}  # by document
        self._adapters = _adapter_digests(settings.documents_adapters)

    @property
    def methods(self) -> list[MethodName]:
        """By which this worker compiles; the last is the default."""
        return list(self._adapters)

    def key(self, record: DocumentRecord) -> str:
        """Of the document's KV in this worker's model."""
        origin = self._mapped.get(record.id)
        made_with = self._adapters.get(record.method) if origin is None else origin.pack
        return block_key(record, self._identity, self._geometry, self._dtype, made_with)

    def map_from(self, record: DocumentRecord, origin: Origin) -> None:
        """From now on the document comes from there."""
        self._mapped[record.id] = origin

    def forget(self, record: DocumentRecord) -> None:
        """Drops what the scheduler has of it."""
        self._scheduler.tell(ForgetReq(rid=new_rid(), key=self.key(record)))
        self._mapped.pop(record.id, None)

    async def obtain(self, record: DocumentRecord, before: str | None) -> Obtained:
        """The KV from the storage, or compiled, or mapped.

        before: where it came from the last time, None the first time: what did not stay with the scheduler then is
        published now. Raises DocumentError, TransferError or TimeoutError.
        """
        if record.method == MAPPED and before is not None:
            raise DocumentError(f"{len(record.ids)} tokens of mapped KV do not stay in --documents-bytes")
        data = await asyncio.to_thread(self._store.block, record, self.key(record))
        if data is not None:
            return Obtained(self._memory.publish_file(memoryview(data)), before or STORAGE)
        answer = await self.compile(record, keep_handle=before is not None)
        return Obtained(answer["handle"], COMPILED)

    async def compile(self, record: DocumentRecord, keep_handle: bool = False) -> Answer:
        """Has the scheduler make the KV and keep it. `handle`: where wanted, else None. Raises as `obtain`."""
        if record.method == MAPPED:
            return await self._map(record)
        message = CompileReq(
            rid=new_rid(), key=self.key(record), ids=list(record.ids), method=record.method,
            publish=keep_handle or self._stores,
        )  # fmt: skip
        answer = await unless_given_up(
            self._compiled(message), lambda late: late.get("handle") and self._memory.drop(late["handle"])
        )
        _check(answer, record, "compiled")
        if self._stores:
            try:
                data = await asyncio.to_thread(self._stored, record, answer["handle"])
            finally:
                self._memory.drop(answer["handle"])  # cancelled before a thread was free, nobody has taken it
            handle = self._memory.publish_file(memoryview(data)) if keep_handle else None
            return {**answer, "handle": handle}
        return answer

    async def _compiled(self, message: CompileReq) -> Answer:
        try:
            return await self._scheduler.ask(message, self._timeout_s)
        except TimeoutError:  # the answer may be on its way, and nobody waits for it
            self._scheduler.tell(ReleaseReq(rid=new_rid(), lease=message.rid))
            raise

    async def _map(self, record: DocumentRecord) -> Answer:
        """Has the source compile the document, and the scheduler map it. Mapped KV is not stored."""
        origin = self._mapped.get(record.id)
        if origin is None:
            raise DocumentError(f"it is not known any more where {record.id} is mapped from; add it again")
        ids = list(record.ids)
        block = await self._sources.document(origin.source, ids, self._timeout_s)
        try:
            message = MapReq(rid=new_rid(), key=self.key(record), ids=ids, handle=block.handle, pack=origin.pack)
            answer = await self._scheduler.ask(message, self._timeout_s)
        finally:
            self._memory.drop(block.handle)
        _check(answer, record, "mapped")
        return {**answer, "ms": {**block.ms, **answer["ms"]}}

    def _stored(self, record: DocumentRecord, handle: str) -> bytes:
        with self._memory.take_file(handle) as file:
            data = file.read()
        self._store.put_block(record, self.key(record), data)
        return data

    @cached_property
    def _geometry(self) -> KVGeometry:
        return KVGeometry.from_json(scheduler_info()["geometry"])

    @cached_property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, scheduler_info()["kv_dtype"].removeprefix("torch."))


def _check(answer: Answer, record: DocumentRecord, what: str) -> None:
    if answer["status"] != APPLIED:
        raise DocumentError(f"the document of {len(record.ids)} tokens was not {what}: {answer['reason']}")


def _adapter_digests(folders: Sequence[str]) -> dict[MethodName, str | None]:
    """By method that a worker compiles by, the digest of what it takes beside the model. The last is the default."""
    digests: dict[MethodName, str | None] = {"plain": None}
    for folder in folders:
        from sglang_ext.documents.adapter import read_manifest

        manifest = read_manifest(folder)
        digests[manifest.settings.method] = manifest.digest
    return digests
