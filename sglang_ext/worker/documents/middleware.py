"""The way of a chat request with documents through the HTTP server: linked before SGLang's route, told of after it."""

from __future__ import annotations

import json
from typing import Any, Awaitable, Callable

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang_ext.worker.answers import Answer
from sglang_ext.worker.documents.parts import has_documents
from sglang_ext.worker.endpoint import HungUp, refusal, unless_hung_up

PATH = "/v1/chat/completions"
FIELD = "documents"
"""Of an answer: what became of the documents."""

_SIGN = b'"document"'

Link = Callable[[dict[str, Any]], Awaitable[tuple[dict[str, Any], Answer]]]
"""Makes of a request with documents one without, and what to tell of them."""


class DocumentMiddleware:
    """Puts `link` before SGLang's chat route. A request without document parts passes as it came."""

    def __init__(self, app: ASGIApp, link: Link) -> None:
        self._app = app
        self._link = link

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        raw = await _read(receive)
        if raw is None:
            return  # the client is gone
        body = _with_documents(raw)
        if body is None:
            await self._app(scope, _replay(raw, receive), send)
            return
        try:
            sent, told = await unless_hung_up(self._link(body), receive)
        except HungUp:
            return
        except Exception as error:
            await refusal(error)(scope, receive, send)
            return
        data = orjson.dumps(sent)
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-length"]
        resized = {**scope, "headers": [*headers, (b"content-length", b"%d" % len(data))]}
        await self._app(resized, _replay(data, receive), _telling(told, send))


def _with_documents(raw: bytes) -> dict[str, Any] | None:
    """The body where it holds document parts. What is wrong with another one is SGLang's to say."""
    if _SIGN not in raw:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) and has_documents(body) else None


async def _read(receive: Receive) -> bytes | None:
    """The whole body, None where the client is gone before its end."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first, then what else comes: that the client is gone."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


def _telling(told: Answer, send: Send) -> Send:
    """A `send` that puts the field into the first JSON object of a good answer: the whole one, or its first event."""
    field = b'"%s":%s,' % (FIELD.encode(), orjson.dumps(told))
    waiting = False

    async def extended(message: Message) -> None:
        nonlocal waiting
        if message["type"] == "http.response.start":
            waiting = message["status"] == 200
            if waiting:
                message = {**message, "headers": [_grown(header, len(field)) for header in message["headers"]]}
        elif waiting and b"{" in message.get("body", b""):
            waiting = False
            head, _, tail = message["body"].partition(b"{")
            message = {**message, "body": head + b"{" + field + tail}
        await send(message)

    return extended


def _grown(header: tuple[bytes, bytes], by: int) -> tuple[bytes, bytes]:
    name, value = header
    return (name, b"%d" % (int(value) + by)) if name.lower() == b"content-length" else header
