"""The plugin inside the HTTP process: the /kv routes, behind SGLang's API keys."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from functools import cached_property
from typing import Any

from fastapi import FastAPI, Request

from sglang_ext.documents.store import DocumentStore
from sglang_ext.errors import BlockError, KVLiftError, NotAccepted, PackError, TransferError
from sglang_ext.hub import local_folder
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.transfer.pack import Manifest, read_manifest
from sglang_ext.transfer.selectors import budget_of, needs_attention
from sglang_ext.worker import spans
from sglang_ext.worker.answers import APPLIED, UNSUPPORTED, declined, fallback, namespace_of
from sglang_ext.worker.bodies import NO_DOCUMENTS, ExportBody, LiftBody, LinkedDocuments, ReleaseBody
from sglang_ext.worker.conversation import Conversation, new_rid, scheduler_info
from sglang_ext.worker.cost import NATIVE, Choice, CostModel
from sglang_ext.worker.counters import LiftCounters
from sglang_ext.worker.documents.chat import ChatDocuments
from sglang_ext.worker.documents.middleware import DocumentMiddleware
from sglang_ext.worker.documents.routes import DocumentRoutes
from sglang_ext.worker.documents.service import Documents
from sglang_ext.worker.documents.storages import storage_of
from sglang_ext.worker.endpoint import guarded, while_connected
from sglang_ext.worker.handover import unless_given_up
from sglang_ext.worker.messages import ALWAYS, CountersReq, ExportReq, HeldReq, LiftReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.sources import Sources
from sglang_ext.worker.transport import Carrier, Carriers, SharedMemory

PROTOCOL = 1
EXPORT_KEPT = 6  # times the transfer timeout that a block waits for a reader who did not say how long he may take


class HttpSide:
    """Routes and the conversation with the scheduler. Made once, with the tokenizer manager."""

    def __init__(self, manager: Any, settings: WorkerSettings) -> None:
        self._manager = manager
        self._settings = settings
        self._memory = SharedMemory(settings.transfer_max_bytes)
        self._carriers = Carriers.started(self._memory, settings)
        self._sources = Sources(self._carriers)
        self._scheduler = Conversation(manager)
        self._counters = LiftCounters()
        self._app: FastAPI | None = None
        args = manager.server_args
        folder = local_folder(args.model_path, args.revision)
        self._identity = ModelIdentity.from_folder(folder, args.chat_template)
        self._packs = [read_manifest(path) for path in settings.packs]
        store = DocumentStore(storage_of(settings))
        self._documents = Documents(
            manager, self._scheduler, self._memory, store, self._identity, settings, self._sources, self._accepted_pack
        )
        self._chat = ChatDocuments(self._documents, self._render, settings.documents)

    def mount(self, app: FastAPI) -> None:
        """Adds the routes."""
        self._app = app
        for method, path, handler in (
            ("GET", "/kv/capabilities", self.capabilities),
            ("GET", "/kv/counters", self.counters),
            ("GET", "/kv/held", self.held),
            ("POST", "/kv/export", while_connected(self.export)),
            ("POST", "/kv/lift", while_connected(self.lift)),
            ("POST", "/kv/release", self.release),
        ):
            app.add_api_route(path, guarded(handler), methods=[method], response_model=None)
        DocumentRoutes(self._documents).mount(app)
        app.add_middleware(DocumentMiddleware, link=self._chat.link)

    async def capabilities(self, _request: Request) -> dict[str, Any]:
        """Who this worker is and which packs it lifts with."""
        scheduler = scheduler_info()
        return {
            "protocol": PROTOCOL,
            "model": self._manager.served_model_name,
            "model_digest": self._identity.model,
            "tokenizer_digest": self._identity.tokenizer,
            "template_digest": self._identity.template,
            "geometry": scheduler["geometry"],
            "page_size": scheduler["page_size"],
            "context_length": self._manager.context_len,
            "packs": [self._describe(pack) for pack in self._packs],
            "transports": self._carriers.names,
            "kernels": scheduler["kernels"],
            "documents": {"policy": self._settings.documents, "methods": self._documents.methods},
            "costs": scheduler["costs"],
        }

    async def counters(self, _request: Request) -> dict[str, Any]:
        """What this worker has done since it started (counters.py)."""
        counted = await self._scheduler.ask(CountersReq(rid=new_rid()), self._settings.transfer_timeout_s)
        return {**counted, **asdict(self._counters), **self._documents.counted()}

    async def held(self, _request: Request) -> dict[str, int]:
        """What this worker holds for work under way, all 0 at rest: leases, slots of open jobs, slots in use by them and
        by running requests, and bytes of the buffer for transfers."""
        held = await self._scheduler.ask(HeldReq(rid=new_rid()), self._settings.transfer_timeout_s)
        return {**held, "buffer_bytes": self._carriers.held_bytes}

    async def export(self, request: Request) -> dict[str, Any]:
        """Publishes this worker's KV of a prefix of the given ids; the reader frees it."""
        body = ExportBody.model_validate(await request.json())
        try:
            carrier = self._carriers.shared_with(body.transports, body.place)
            settings = self._settings
            async with asyncio.timeout(settings.documents_timeout_s if body.document else settings.transfer_timeout_s):
                return await unless_given_up(
                    self._export(body, carrier),
                    lambda answer: carrier.drop(answer["handle"]) if "handle" in answer else None,
                )
        except TransferError as error:
            return {"tokens": 0, "reason": str(error)}

    async def _export(self, body: ExportBody, carrier: Carrier) -> dict[str, Any]:
        answer = await self._exported(body)
        if "handle" not in answer:
            return answer
        phases = Phases()
        with phases("offer"):
            handle = await carrier.offer(answer["handle"])
        # A reader that dies before it comes must not hold this host's memory.
        wait = body.keep_s or EXPORT_KEPT * self._settings.transfer_timeout_s
        asyncio.get_running_loop().call_later(wait, carrier.drop, handle)
        ms = {**answer["ms"], **phases.ms} if carrier.remote else answer["ms"]
        return {**answer, "transport": carrier.name, "handle": handle, "ms": ms}

    async def _exported(self, body: ExportBody) -> dict[str, Any]:
        """The block in this host's shared memory."""
        if body.document:
            return await self._documents.published(body.input_ids, body.cache_salt)
        message = ExportReq(
            rid=new_rid(), ids=body.input_ids, cache_salt=body.cache_salt, attention=body.attention,
            documents=await asyncio.to_thread(self._documents.keys, body.documents, body.cache_salt),
            recompute=body.recompute, rho=self._settings.rho,
        )  # fmt: skip
        return await self._scheduler.ask(message, None)

    async def release(self, request: Request) -> dict[str, Any]:
        """Frees an exported block, or gives up a lease."""
        body = ReleaseBody.model_validate(await request.json())
        if body.handle is not None:
            self._carriers.drop(body.handle)
        if body.lease is not None:
            self._scheduler.tell(ReleaseReq(rid=new_rid(), lease=body.lease))
        return {"released": True}

    async def lift(self, request: Request) -> dict[str, Any]:
        """Lifts the prompt's KV from the source worker into this one (design.md, step 3)."""
        started = time.perf_counter()
        body = LiftBody.model_validate(await request.json())
        rho = self._settings.rho if body.rho is None else body.rho
        try:
            answer = {"choice": None, **await self._choose_and_lift(body, rho)}
        except asyncio.CancelledError:
            self._counters.lifts_failed += 1
            raise
        self._count(answer)
        if answer["status"] == APPLIED:
            spans.phases(answer["ms"])
            answer["ms"]["total"] = (time.perf_counter() - started) * 1e3
        asked = {"rho": rho if body.coverage is None else None, "coverage": body.coverage, "selector": body.selector}
        return {**answer, **asked}

    async def _choose_and_lift(self, body: LiftBody, rho: float) -> dict[str, Any]:
        try:
            ids, linked = self._prompt(body)
            self._check_prompt(ids)
            pack = self._accepted_pack(body.pack)
        except KVLiftError as error:
            return {"status": UNSUPPORTED, "reason": str(error)}
        choice = self._choose(body, pack, len(ids), rho)
        if choice.chosen == NATIVE:
            return declined(choice)
        lease = new_rid()
        timeout = body.timeout_s or self._settings.transfer_timeout_s
        try:
            async with asyncio.timeout(timeout):
                answer = await self._export_and_lift(body, ids, linked, pack, rho, lease, timeout)
        except TimeoutError:
            self._give_up(lease)
            answer = fallback(f"the lift took longer than {timeout} s")
        except (TransferError, BlockError) as error:
            answer = fallback(str(error))
        except asyncio.CancelledError:
            self._give_up(lease)
            raise
        return {"choice": choice.model_dump(), **answer}

    @cached_property
    def _costs(self) -> CostModel:
        """As the scheduler measured them at its start. A worker with an accepted pack has them."""
        return CostModel.model_validate(scheduler_info()["costs"])

    def _choose(self, body: LiftBody, pack: Manifest, length: int, rho: float) -> Choice:
        """Before anybody is asked, and as if nothing of the prompt were here; the scheduler, which knows, confirms."""
        budget = rho if body.coverage is None else body.coverage
        return self._costs.choose(pack.weights_sha256, length, budget, body.when == ALWAYS)

    async def _export_and_lift(
        self,
        body: LiftBody,
        ids: list[int],
        linked: LinkedDocuments,
        pack: Manifest,
        rho: float,
        lease: str,
        timeout: float,
    ) -> dict[str, Any]:
        block = await self._sources.collect(body.source, ids, needs_attention(body.selector), timeout, linked)
        digest = pack.weights_sha256
        namespace = namespace_of(digest, body.selector, budget_of(rho, body.coverage), body.cache_salt, linked)
        message = LiftReq(
            rid=lease, ids=ids, handle=block.handle, pack=digest, rho=rho, coverage=body.coverage,
            selector=body.selector, when=body.when, namespace=namespace, cache_salt=body.cache_salt,
            lease_s=body.lease_s or self._settings.lease_s, explain=body.explain,
        )  # fmt: skip
        try:
            answer = await self._scheduler.ask(message, None)
        finally:
            self._memory.drop(block.handle)
        if answer["status"] == APPLIED:
            times = {**block.ms, **answer["ms"]}  # in the order in which they ran
            answer |= {"ms": times, "transport": block.transport, "namespace": namespace, "lease": lease}
        return answer

    def _count(self, answer: dict[str, Any]) -> None:
        if answer["status"] == APPLIED:
            self._counters.lifts += 1
        elif answer["choice"] is not None and answer["choice"]["chosen"] == NATIVE:
            self._counters.lifts_declined += 1
        else:
            self._counters.lifts_failed += 1

    def _give_up(self, lease: str) -> None:
        self._scheduler.tell(ReleaseReq(rid=new_rid(), lease=lease))

    def _render(self, request: dict[str, Any]) -> list[int]:
        """Token ids of a chat or completion request, through SGLang's own endpoint for it."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest

        state = self._app.state
        if "prompt" in request:
            serving, body = state.openai_serving_completion, CompletionRequest.model_validate(request)
        else:
            serving, body = state.openai_serving_chat, ChatCompletionRequest.model_validate(request)
        internal, _ = serving._convert_to_internal_request(body)
        if internal.input_ids is not None:
            return list(internal.input_ids)
        return self._manager.tokenizer.encode(internal.text)

    def _prompt(self, body: LiftBody) -> tuple[list[int], LinkedDocuments]:
        """Token ids of what is to be lifted, and the documents that the source has linked in it.

        Raises UnknownDocument, or pydantic's ValidationError.
        """
        if body.input_ids is not None:
            return body.input_ids, NO_DOCUMENTS
        plain, records, options = self._chat.read(body.request or {})
        return self._render(plain), LinkedDocuments(tuple(record.id for record in records), options.recompute)

    def _check_prompt(self, ids: list[int]) -> None:
        limit = self._manager.context_len
        if len(ids) >= limit:
            raise TransferError(f"the prompt has {len(ids)} tokens; this worker's context holds {limit}")

    def _accepted_pack(self, wanted: str | None) -> Manifest:
        """Raises PackError where it is not loaded, or not to be used."""
        pack = self._choose_pack(wanted)
        pack.check_accepted(self._settings.acceptance_threshold, self._settings.allow_bench_pack)
        return pack

    def _choose_pack(self, wanted: str | None) -> Manifest:
        chosen = [pack for pack in self._packs if wanted is None or wanted in (pack.name, pack.weights_sha256)]
        if len(chosen) != 1:
            asked = "no pack was named" if wanted is None else f"pack {wanted!r} is not loaded"
            raise PackError(f"{asked}; this worker has {[pack.name for pack in self._packs] or 'none'}")
        return chosen[0]

    def _describe(self, pack: Manifest) -> dict[str, Any]:
        reason = None
        try:
            pack.check_accepted(self._settings.acceptance_threshold, self._settings.allow_bench_pack)
        except NotAccepted as error:
            reason = str(error)
        return {
            "name": pack.name, "digest": pack.weights_sha256, "source_model_digest": pack.source.model,
            "accepted": reason is None, "bench_only": pack.bench_only, "reason": reason,
        }  # fmt: skip
