"""The plugin inside the HTTP process: the /kv routes, behind SGLang's API keys."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import asdict
from functools import cached_property
from typing import Any

import httpx
from fastapi import FastAPI, Request

from sglang_ext.errors import KVLiftError, NotAccepted, PackError, TransferError
from sglang_ext.hub import local_folder
from sglang_ext.identity import ModelIdentity
from sglang_ext.transfer.pack import Manifest, read_manifest
from sglang_ext.transfer.selectors import budget_of, needs_attention
from sglang_ext.worker.answers import APPLIED, UNSUPPORTED, declined, fallback, namespace_of
from sglang_ext.worker.bodies import ExportBody, LiftBody, ReleaseBody
from sglang_ext.worker.conversation import Conversation
from sglang_ext.worker.cost import NATIVE, Choice, CostModel
from sglang_ext.worker.counters import LiftCounters
from sglang_ext.worker.endpoint import guarded
from sglang_ext.worker.messages import ALWAYS, CountersReq, ExportReq, LiftReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import SharedMemory

PROTOCOL = 1
EXPORT_KEPT = 6  # times the transfer timeout that a block waits for a reader who did not say how long he may take


class HttpSide:
    """Routes and the conversation with the scheduler. Made once, with the tokenizer manager."""

    def __init__(self, manager: Any, settings: WorkerSettings) -> None:
        self._manager = manager
        self._settings = settings
        self._transport = SharedMemory(settings.transfer_max_bytes)
        self._scheduler = Conversation(manager)
        self._counters = LiftCounters()
        self._client: httpx.AsyncClient | None = None
        self._app: FastAPI | None = None
        args = manager.server_args
        folder = local_folder(args.model_path, args.revision)
        self._identity = ModelIdentity.from_folder(folder, args.chat_template)
        self._packs = [read_manifest(path) for path in settings.packs]

    def mount(self, app: FastAPI) -> None:
        """Adds the routes."""
        self._app = app
        for method, path, handler in (
            ("GET", "/kv/capabilities", self.capabilities),
            ("GET", "/kv/counters", self.counters),
            ("POST", "/kv/export", self.export),
            ("POST", "/kv/lift", self.lift),
            ("POST", "/kv/release", self.release),
        ):
            app.add_api_route(path, guarded(handler), methods=[method], response_model=None)

    async def capabilities(self, _request: Request) -> dict[str, Any]:
        """Who this worker is and which packs it lifts with."""
        scheduler = _scheduler_info()
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
            "transports": [self._transport.name],
            "kernels": scheduler["kernels"],
            "costs": scheduler["costs"],
        }

    async def counters(self, _request: Request) -> dict[str, Any]:
        """What this worker has done since it started (counters.py)."""
        counted = await self._scheduler.ask(CountersReq(rid=_rid()), self._settings.transfer_timeout_s)
        return {**counted, **asdict(self._counters)}

    async def export(self, request: Request) -> dict[str, Any]:
        """Publishes this worker's KV of a prefix of the given ids; the reader frees it."""
        body = ExportBody.model_validate(await request.json())
        message = ExportReq(rid=_rid(), ids=body.input_ids, cache_salt=body.cache_salt, attention=body.attention)
        answer = await self._scheduler.ask(message, self._settings.transfer_timeout_s)
        if "handle" in answer:  # a reader that dies before it comes must not hold this host's memory
            wait = body.keep_s or EXPORT_KEPT * self._settings.transfer_timeout_s
            asyncio.get_running_loop().call_later(wait, self._transport.drop, answer["handle"])
        return {"transport": self._transport.name, **answer}

    async def release(self, request: Request) -> dict[str, Any]:
        """Frees an exported block, or gives up a lease."""
        body = ReleaseBody.model_validate(await request.json())
        if body.handle is not None:
            self._transport.drop(body.handle)
        if body.lease is not None:
            self._scheduler.tell(ReleaseReq(rid=_rid(), lease=body.lease))
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
            answer["ms"]["total"] = (time.perf_counter() - started) * 1e3
        asked = {"rho": rho if body.coverage is None else None, "coverage": body.coverage, "selector": body.selector}
        return {**answer, **asked}

    async def _choose_and_lift(self, body: LiftBody, rho: float) -> dict[str, Any]:
        ids = body.input_ids or self._render(body.request or {})
        try:
            self._check_prompt(ids)
            pack = self._choose_pack(body.pack)
            pack.check_accepted(self._settings.acceptance_threshold, self._settings.allow_bench_pack)
        except KVLiftError as error:
            return {"status": UNSUPPORTED, "reason": str(error)}
        choice = self._choose(body, pack, len(ids), rho)
        if choice.chosen == NATIVE:
            return declined(choice)
        lease = _rid()
        timeout = body.timeout_s or self._settings.transfer_timeout_s
        try:
            async with asyncio.timeout(timeout):
                answer = await self._export_and_lift(body, ids, pack, rho, lease, timeout)
        except TimeoutError:
            self._give_up(lease)
            answer = fallback(f"the lift took longer than {timeout} s")
        except TransferError as error:
            answer = fallback(str(error))
        except asyncio.CancelledError:
            self._give_up(lease)
            raise
        return {"choice": choice.model_dump(), **answer}

    @cached_property
    def _costs(self) -> CostModel:
        """As the scheduler measured them at its start. A worker with an accepted pack has them."""
        return CostModel.model_validate(_scheduler_info()["costs"])

    def _choose(self, body: LiftBody, pack: Manifest, length: int, rho: float) -> Choice:
        """Before anybody is asked, and as if nothing of the prompt were here; the scheduler, which knows, confirms."""
        budget = rho if body.coverage is None else body.coverage
        return self._costs.choose(pack.weights_sha256, length, budget, body.when == ALWAYS)

    async def _export_and_lift(
        self, body: LiftBody, ids: list[int], pack: Manifest, rho: float, lease: str, timeout: float
    ) -> dict[str, Any]:
        exported = await self._ask_source(body, ids, timeout)
        if exported["tokens"] == 0:
            raise TransferError(exported.get("reason") or "the source worker holds no KV of this prompt")
        digest = pack.weights_sha256
        namespace = namespace_of(digest, body.selector, budget_of(rho, body.coverage), body.cache_salt)
        message = LiftReq(
            rid=lease, ids=ids, handle=exported["handle"], pack=digest, rho=rho, coverage=body.coverage,
            selector=body.selector, when=body.when, namespace=namespace, cache_salt=body.cache_salt,
            lease_s=body.lease_s or self._settings.lease_s, explain=body.explain,
        )  # fmt: skip
        try:
            answer = await self._scheduler.ask(message, None)
        finally:
            self._transport.drop(exported["handle"])
        if answer["status"] == APPLIED:
            answer["ms"].update(exported["ms"])
            answer |= {"namespace": namespace, "lease": lease}
        return answer

    def _count(self, answer: dict[str, Any]) -> None:
        if answer["status"] == APPLIED:
            self._counters.lifts += 1
        elif answer["choice"] is not None and answer["choice"]["chosen"] == NATIVE:
            self._counters.lifts_declined += 1
        else:
            self._counters.lifts_failed += 1

    async def _ask_source(self, body: LiftBody, ids: list[int], timeout: float) -> dict[str, Any]:
        """The source's answer to /kv/export. Raises TransferError where it does not come.

        The block waits as long as the lift may take: many lifts at once queue for the scheduler behind each other.
        """
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)
        source = body.source
        headers = {"authorization": f"Bearer {source.api_key}"} if source.api_key else {}
        try:
            reply = await self._client.post(
                f"{source.url.rstrip('/')}/kv/export",
                json={
                    "input_ids": ids, "cache_salt": source.cache_salt, "keep_s": timeout,
                    "attention": needs_attention(body.selector),
                },
                headers=headers,
            )
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise TransferError(f"the source worker at {source.url} did not export: {error!r}") from error

    def _give_up(self, lease: str) -> None:
        self._scheduler.tell(ReleaseReq(rid=_rid(), lease=lease))

    def _render(self, request: dict[str, Any]) -> list[int]:
        """Token ids of a chat request, through SGLang's own chat endpoint."""
        from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

        chat = self._app.state.openai_serving_chat
        internal, _ = chat._convert_to_internal_request(ChatCompletionRequest.model_validate(request))
        if internal.input_ids is not None:
            return list(internal.input_ids)
        return self._manager.tokenizer.encode(internal.text)

    def _check_prompt(self, ids: list[int]) -> None:
        limit = self._manager.context_len
        if len(ids) >= limit:
            raise TransferError(f"the prompt has {len(ids)} tokens; this worker's context holds {limit}")

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


def _scheduler_info() -> dict[str, Any]:
    """What the scheduler said of itself when it was ready (SchedulerSide.describe)."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().scheduler_info["kvlift"]


def _rid() -> str:
    return uuid.uuid4().hex
