"""A worker that follows a script, over a real socket: what it says, when it fails, and what it was asked."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

CONFIDENT, UNSURE = -0.01, -3.0


@dataclass
class Script:
    """How the worker behaves from now on. Steps of `before` and `after` are run in order around the answer's words."""

    words: list[str] = field(default_factory=lambda: ["Hello", " there", "."])
    logprob: float | None = CONFIDENT
    words_per_event: int = 1
    status: int = 200  # of the chat route
    error: dict[str, Any] | None = None  # body for a status other than 200
    fail_times: int | None = None  # `status` holds for so many calls; None: for all
    first_token_s: float = 0.0
    held: threading.Event | None = None  # no answer has a first token before it is set
    fault_after: int | None = None  # after so many words...
    fault: str = "cut"  # ...cut, stall, error_event, bad_json, done, abort
    error_event: dict[str, Any] = field(default_factory=lambda: {"message": "boom", "type": "x", "code": 500})
    deltas: list[dict[str, Any]] | None = None  # in place of words
    finish_reason: str = "stop"
    send_done: bool = True
    lift: dict[str, Any] | None = None  # answer to /kv/lift
    lift_status: int = 200
    lift_delay_s: float = 0.0
    health_status: int = 200
    check: dict[str, float] = field(default_factory=dict)  # a question's reply: log-probabilities of its first token
    check_status: int = 200
    check_s: float = 0.0
    queued: int | None = None  # what /v1/loads tells
    capabilities: dict[str, Any] | None = None
    prompt_tokens: int = 11
    cached_tokens: int = 5


class FakeWorker:
    """`calls` are the chat bodies, `checks` those that ask for one token, `lifts` the lift bodies.

    `headers` are those of each call; `aborted` counts hang-ups, `stalled` streams that stopped.
    """

    def __init__(self, served: str) -> None:
        self.served = served
        self.address = ""
        self.running = 0
        self.reset(Script())

    def reset(self, script: Script) -> None:
        """Forgets what was asked and follows `script` from now on."""
        self.script = script
        self.calls: list[dict[str, Any]] = []
        self.checks: list[dict[str, Any]] = []
        self.lifts: list[dict[str, Any]] = []
        self.documents: dict[tuple[str, str | None], dict[str, Any]] = {}  # by id and salt
        self.headers: list[tuple[str, dict[str, str]]] = []
        self.connections: set[Any] = set()
        self.aborted = 0
        self.stalled = 0

    def app(self) -> Any:
        routes = self._routes()

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                request = Request(scope)
                self.headers.append((request.url.path, dict(request.headers)))
                self.connections.add(request.client)
            await routes(scope, receive, send)

        return noting

    def _routes(self) -> FastAPI:
        app = FastAPI()

        @app.get("/health")
        async def health() -> Response:
            return Response(status_code=self.script.health_status)

        @app.get("/kv/capabilities")
        async def capabilities() -> Response:
            told = self.script.capabilities
            return JSONResponse(told, 200) if told else JSONResponse({"error": "not found"}, 404)

        @app.get("/v1/loads")
        async def loads() -> Response:
            told = self.script.queued
            if told is None:
                return JSONResponse({"error": "not found"}, 404)
            return JSONResponse({"loads": [{"dp_rank": 0, "num_waiting_reqs": told}]})

        @app.post("/v1/documents")
        async def add(request: Request) -> Response:
            body = await request.json()
            self.calls.append(body)
            if self.script.status != 200:
                return JSONResponse({"error": {"message": "no", "code": self.script.status}}, self.script.status)
            named = {"id": f"doc-{len(body['text'])}", "created": len(self.documents), "tokens": 3}
            self.documents[named["id"], body.get("cache_salt")] = named
            return JSONResponse({**named, "bytes": 100, "ms": {"compile": 1.0}})

        @app.get("/v1/documents")
        async def listing(request: Request) -> dict[str, Any]:
            salt = request.query_params.get("cache_salt")
            return {"data": [one for (_, other), one in self.documents.items() if other == salt]}

        @app.get("/v1/documents/{name}")
        @app.delete("/v1/documents/{name}")
        async def one(name: str, request: Request) -> Response:
            key = name, request.query_params.get("cache_salt")
            if key not in self.documents:
                return JSONResponse({"error": {"message": "no such document", "code": 404}}, 404)
            if request.method == "GET":
                return JSONResponse({**self.documents[key], "text": "x"})
            del self.documents[key]
            return JSONResponse({"id": name, "deleted": True})

        @app.post("/kv/lift")
        async def lift(request: Request) -> Response:
            self.lifts.append(await request.json())
            await asyncio.sleep(self.script.lift_delay_s)
            return JSONResponse(self.script.lift or {}, self.script.lift_status)

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            if body.get("max_tokens") == 1:
                return await self._reply(body)
            return await answer(request, body)

        @app.post("/v1/completions")
        async def complete(request: Request) -> Response:
            return await answer(request, await request.json())

        async def answer(request: Request, body: dict[str, Any]) -> Response:
            script = self.script
            self.calls.append(body)
            if script.status != 200 and (script.fail_times is None or len(self.calls) <= script.fail_times):
                return JSONResponse(script.error or {"error": {"message": "no", "code": script.status}}, script.status)
            if body.get("stream"):
                return StreamingResponse(self._guarded(self._stream(body)), media_type="text/event-stream")
            return await self._buffered(request, body)

        return app

    async def _reply(self, body: dict[str, Any]) -> Response:
        """To a question about an answer: one token."""
        self.checks.append(body)
        await asyncio.sleep(self.script.check_s)
        if self.script.check_status != 200:
            return JSONResponse({"error": {"message": "no"}}, self.script.check_status)
        top = [{"token": text, "logprob": value, "bytes": None} for text, value in self.script.check.items()]
        entry = {**(top or [{"token": "?", "logprob": -9.0, "bytes": None}])[0], "top_logprobs": top}
        message = {"role": "assistant", "content": entry["token"]}
        choice = {"index": 0, "message": message, "finish_reason": "length", "logprobs": {"content": [entry]}}
        return JSONResponse({**self._head(body, "chat.completion"), "choices": [choice], "usage": self._usage()})

    async def _guarded(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        self.running += 1
        try:
            async for event in events:
                yield event
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        script = self.script
        if "prompt" not in body:
            yield self._event(body, {"role": "assistant", "content": ""})
        await self._until_first_token()
        groups = [[delta] for delta in script.deltas] if script.deltas is not None else self._groups()
        sent = 0
        for group in groups:
            if script.fault_after is not None and sent >= script.fault_after:
                break
            delta = group[0] if script.deltas is not None else {"content": "".join(group)}
            yield self._event(body, delta, self._logprobs(body, [str(w) for w in group]))
            sent += len(group)
            await asyncio.sleep(0)
        if script.fault_after is not None:
            async for event in self._fault(body):
                yield event
            return
        yield self._event(body, {}, finish=script.finish_reason)
        if (body.get("stream_options") or {}).get("include_usage"):
            yield _sse({**self._head(body, "chat.completion.chunk"), "choices": [], "usage": self._usage()})
        if script.send_done:
            yield "data: [DONE]\n\n"

    async def _until_first_token(self) -> None:
        held = self.script.held
        while held is not None and not held.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(self.script.first_token_s)

    async def _fault(self, body: dict[str, Any]) -> AsyncIterator[str]:
        match self.script.fault:
            case "stall":
                self.stalled += 1
                await asyncio.sleep(600)
            case "error_event":
                yield _sse({"error": self.script.error_event})
                yield "data: [DONE]\n\n"
            case "bad_json":
                yield "data: {not json\n\n"
                await asyncio.sleep(600)
            case "done":
                yield "data: [DONE]\n\n"
            case "abort":
                yield self._event(body, {}, finish="abort")
                yield "data: [DONE]\n\n"
            case "cut":
                await asyncio.sleep(0.05)  # what was written leaves before the connection breaks
                raise ConnectionAbortedError("scripted")

    async def _buffered(self, request: Request, body: dict[str, Any]) -> Response:
        script = self.script
        self.running += 1
        try:
            if script.fault == "stall" and script.fault_after is not None:
                while not await request.is_disconnected():
                    await asyncio.sleep(0.02)
                self.aborted += 1
                return Response(status_code=499)
            await self._until_first_token()
            message = {"role": "assistant", "content": "".join(script.words)}
            for delta in script.deltas or []:
                message.update(delta)
            said = {"text": message["content"]} if "prompt" in body else {"message": message}
            end = {"finish_reason": script.finish_reason, "logprobs": self._logprobs(body, script.words)}
            choices = [{"index": i, **said, **end} for i in range(body.get("n") or 1)]
            return JSONResponse({**self._head(body, "chat.completion"), "choices": choices, "usage": self._usage()})
        finally:
            self.running -= 1

    def _groups(self) -> Iterator[list[str]]:
        words, step = self.script.words, self.script.words_per_event
        for start in range(0, len(words), step):
            yield words[start : start + step]

    def _logprobs(self, body: dict[str, Any], words: list[str]) -> dict[str, Any] | None:
        asked = body.get("logprobs")
        if asked is None or asked is False or self.script.logprob is None:
            return None
        if "prompt" in body:
            told = {f"t{rank}": self.script.logprob - rank for rank in range(asked)}
            tops = [told for _ in words] if told else []
            chosen = [self.script.logprob] * len(words)
            return {"tokens": words, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": [-1] * len(words)}
        ranks = range(body.get("top_logprobs") or 0)
        return {
            "content": [
                {
                    "token": word,
                    "logprob": self.script.logprob,
                    "bytes": None,
                    "top_logprobs": [
                        {"token": f"t{r}", "logprob": self.script.logprob - r, "bytes": None} for r in ranks
                    ],
                }
                for word in words
            ]
        }

    def _event(
        self, body: dict[str, Any], delta: dict[str, Any], logprobs: Any = None, finish: str | None = None
    ) -> str:
        said = {"text": delta.get("content") or ""} if "prompt" in body else {"delta": delta}
        choice = {"index": 0, **said, "logprobs": logprobs, "finish_reason": finish}
        return _sse({**self._head(body, "chat.completion.chunk"), "choices": [choice]})

    def _head(self, body: dict[str, Any], kind: str) -> dict[str, Any]:
        told = "text_completion" if "prompt" in body else kind
        return {"id": f"id-{self.served}", "object": told, "created": 1, "model": body["model"]}

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self.script.prompt_tokens, len(self.script.words)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.script.cached_tokens},
        }


def _sse(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def capabilities(served: str, **changes: Any) -> dict[str, Any]:
    """What a worker says that can lift from the worker `small`."""
    told = {
        "protocol": 1,
        "model": served,
        "model_digest": f"d-{served}",
        "tokenizer_digest": "tok",
        "template_digest": "tpl",
        "geometry": {},
        "page_size": 1,
        "context_length": 4096,
        "packs": [{**packs("small-to-large")[0], "digest": "d-pack"}] if served == "large" else [],
        "transports": ["shm"],
    }
    return {**told, **changes}


def packs(*names: str) -> list[dict[str, Any]]:
    """What a worker says of the packs that it has loaded, each named SOURCE-to-TARGET."""
    return [
        {
            "name": name,
            "digest": f"d-{name}",
            "source_model_digest": f"d-{name.split('-to-')[0]}",
            "accepted": True,
            "bench_only": False,
            "reason": None,
        }
        for name in names
    ]


def applied(**changes: Any) -> dict[str, Any]:
    """An answer to /kv/lift."""
    return {
        "status": "applied",
        "reason": None,
        "namespace": "ns-1",
        "tokens": {"prompt": 11, "prefix": 0, "lifted": 7, "recomputed": 4},
        "rho": 0.3,
        "coverage": None,
        "selector": "rank_disagreement",
        "chosen_rho": 0.45,
        "choice": {"native_ms": 30.0, "lift_ms": 20.0, "chosen": "lift"},
        "bytes": 4096,
        "ms": {"export": 1.0, "transfer": 1.0, "map": 1.0, "score": 1.0, "recompute": 1.0, "insert": 1.0, "total": 6.0},
        **changes,
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class _Server(uvicorn.Server):
    """Looks often whether it should stop: a test should not wait for it."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(0.01)


@contextmanager
def serving(app: Any, port: int = 0) -> Iterator[str]:
    """Runs an ASGI app on a real socket in a thread; yields its address."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        sock.close()


def until(condition: Any, seconds: float = 10.0) -> None:
    """Waits for a condition, or fails the test."""
    pause, waited = 0.01, 0.0
    while not condition():
        assert waited < seconds, "the condition did not come true"
        threading.Event().wait(pause)
        waited += pause
