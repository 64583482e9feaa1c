"""The plugin inside the HTTP process: the /kv routes, behind SGLang's API keys."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any, Callable

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sglang.srt.utils.auth import AuthLevel, auth_level
from sglang.utils import TypeBasedDispatcher

from sglang_ext.errors import KVLiftError, NotAccepted, PackError, TransferError
from sglang_ext.hub import local_folder
from sglang_ext.identity import ModelIdentity
from sglang_ext.transfer.pack import Manifest, read_manifest
from sglang_ext.transfer.selectors import budget_of
from sglang_ext.worker.bodies import ExportBody, LiftBody, ReleaseBody
from sglang_ext.worker.lifting import FALLBACK, namespace_of
from sglang_ext.worker.messages import ExportReq, KVReply, LiftReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import SharedMemory

PROTOCOL = 1
EXPORT_KEPT = 6  # times the transfer timeout that a block waits for its reader
UNSUPPORTED = "unsupported"


class HttpSide:
    """Routes and the conversation with the scheduler. Made once, with the tokenizer manager."""

    def __init__(self, manager: Any, settings: WorkerSettings) -> None:
        self._manager = manager
        self._settings = settings
        self._transport = SharedMemory(settings.transfer_max_bytes)
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._client: httpx.AsyncClient | None = None
        self._app: FastAPI | None = None
        args = manager.server_args
        folder = local_folder(args.model_path, args.revision)
        self._identity = ModelIdentity.from_folder(folder, args.chat_template)
        self._packs = [read_manifest(path) for path in settings.packs]
        manager._result_dispatcher += TypeBasedDispatcher([(KVReply, self._on_reply)])

    def mount(self, app: FastAPI) -> None:
        """Adds the routes. ADMIN_OPTIONAL: SGLang's admin key opens them where one is set, else its API key."""
        self._app = app
        for method, path, handler in (
            ("GET", "/kv/capabilities", self.capabilities),
            ("POST", "/kv/export", self.export),
            ("POST", "/kv/lift", self.lift),
            ("POST", "/kv/release", self.release),
        ):
            app.add_api_route(path, _guarded(handler), methods=[method], response_model=None)

    async def capabilities(self, _request: Request) -> dict[str, Any]:
        """Who this worker is and which packs it lifts with."""
        from sglang.srt.entrypoints.http_server import get_global_state

        scheduler = get_global_state().scheduler_info["kvlift"]
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
        }

    async def export(self, request: Request) -> dict[str, Any]:
        """Publishes this worker's KV of a prefix of the given ids; the reader frees it."""
        body = ExportBody.model_validate(await request.json())
        message = ExportReq(rid=_rid(), ids=body.input_ids, cache_salt=body.cache_salt)
        answer = await self._ask(message, self._settings.transfer_timeout_s)
        if "handle" in answer:  # a reader that dies before it comes must not hold this host's memory
            wait = EXPORT_KEPT * self._settings.transfer_timeout_s
            asyncio.get_running_loop().call_later(wait, self._transport.drop, answer["handle"])
        return {"transport": self._transport.name, **answer}

    async def release(self, request: Request) -> dict[str, Any]:
        """Frees an exported block, or gives up a lease."""
        body = ReleaseBody.model_validate(await request.json())
        if body.handle is not None:
            self._transport.drop(body.handle)
        if body.lease is not None:
            self._manager._dispatch_to_scheduler(ReleaseReq(rid=_rid(), lease=body.lease))
        return {"released": True}

    async def lift(self, request: Request) -> dict[str, Any]:
        """Lifts the prompt's KV from the source worker into this one (design.md, step 3)."""
        started = time.perf_counter()
        body = LiftBody.model_validate(await request.json())
        rho = self._settings.rho if body.rho is None else body.rho
        ids = body.input_ids or self._render(body.request or {})
        try:
            self._check_prompt(ids)
            pack = self._choose(body.pack)
            pack.check_accepted(self._settings.acceptance_threshold, self._settings.allow_bench_pack)
        except KVLiftError as error:
            return {"status": UNSUPPORTED, "reason": str(error), "rho": rho}
        budget = budget_of(rho, body.coverage)
        namespace = namespace_of(pack.weights_sha256, body.selector, budget, body.cache_salt)
        lease = _rid()
        timeout = body.timeout_s or self._settings.transfer_timeout_s
        try:
            async with asyncio.timeout(timeout):
                answer = await self._export_and_lift(body, ids, pack, rho, namespace, lease)
        except TimeoutError:
            self._give_up(lease)
            answer = {"status": FALLBACK, "reason": f"the lift took longer than {timeout} s"}
        except TransferError as error:
            answer = {"status": FALLBACK, "reason": str(error)}
        except asyncio.CancelledError:
            self._give_up(lease)
            raise
        if answer["status"] == "applied":
            answer["namespace"] = namespace
            answer["lease"] = lease
            answer["ms"]["total"] = (time.perf_counter() - started) * 1e3
        return {**answer, "rho": rho}

    async def _export_and_lift(
        self, body: LiftBody, ids: list[int], pack: Manifest, rho: float, namespace: str, lease: str
    ) -> dict[str, Any]:
        exported = await self._ask_source(body, ids)
        if exported["tokens"] == 0:
            raise TransferError(exported.get("reason") or "the source worker holds no KV of this prompt")
        message = LiftReq(
            rid=lease, ids=ids, handle=exported["handle"], pack=pack.weights_sha256,
            rho=rho, coverage=body.coverage, selector=body.selector, namespace=namespace, cache_salt=body.cache_salt, lease_s=body.lease_s or self._settings.lease_s, explain=body.explain,
        )  # fmt: skip
        try:
            answer = await self._ask(message, None)
        finally:
            self._transport.drop(exported["handle"])
        if answer["status"] == "applied":
            answer["ms"].update(exported["ms"])
        return answer

    async def _ask_source(self, body: LiftBody, ids: list[int]) -> dict[str, Any]:
        """The source's answer to /kv/export. Raises TransferError where it does not come."""
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=None)
        source = body.source
        headers = {"authorization": f"Bearer {source.api_key}"} if source.api_key else {}
        try:
            reply = await self._client.post(
                f"{source.url.rstrip('/')}/kv/export",
                json={"input_ids": ids, "cache_salt": source.cache_salt},
                headers=headers,
            )
            reply.raise_for_status()
            return reply.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise TransferError(f"the source worker at {source.url} did not export: {error!r}") from error

    async def _ask(self, message: Any, timeout: float | None) -> dict[str, Any]:
        """Sends a message to the scheduler and waits for its reply."""
        # SGLang starts the loop that receives replies with its first request; ours may be that one.
        self._manager.auto_create_handle_loop()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[message.rid] = future
        try:
            self._manager._dispatch_to_scheduler(message)
            async with asyncio.timeout(timeout):
                return await future
        finally:
            del self._waiting[message.rid]

    def _on_reply(self, reply: KVReply) -> None:
        future = self._waiting.get(reply.rid)
        if future is not None and not future.done():
            future.set_result(reply.body)

    def _give_up(self, lease: str) -> None:
        self._manager._dispatch_to_scheduler(ReleaseReq(rid=_rid(), lease=lease))

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

    def _choose(self, wanted: str | None) -> Manifest:
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


def _guarded(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """The handler as an endpoint: behind the admin key, with bad input as OpenAI's error JSON."""

    async def endpoint(request: Request) -> Any:
        try:
            return await handler(request)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _bad_request(f"{where}: {first['msg']}" if where else first["msg"], where or None)
        except (ValueError, KVLiftError) as error:
            return _bad_request(str(error), None)
        except TimeoutError:
            return _error(504, "the scheduler did not answer in time", None)

    return auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def _bad_request(message: str, param: str | None) -> JSONResponse:
    return _error(400, message, param)


def _error(status: int, message: str, param: str | None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)


def _rid() -> str:
    return uuid.uuid4().hex
