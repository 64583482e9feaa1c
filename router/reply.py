"""The answer as the client sees it: one clean OpenAI answer, streamed or not, whoever gave it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.cascade import Cascade
from router.climb import Answer
from router.editor import Editor
from router.errors import ApiError
from router.record import Record
from router.request import Request
from router.routes import Route
from router.sse import encode
from router.telemetry.observer import Observer

log = logging.getLogger(__name__)

Place = Callable[[], AbstractAsyncContextManager[None]]
"""Waits for a place among the requests that are served, and holds it. Raises `ApiError` where there is none."""


class Reply(Response):
    """Runs one request and sends its answer. A client that hangs up ends everything that runs for it."""

    def __init__(
        self, cascade: Cascade, request: Request, route: Route, record: Record, place: Place, observer: Observer
    ) -> None:
        super().__init__()
        self._cascade = cascade
        self._request = request
        self._route = route
        self._place = place
        self._record = record
        self._observer = observer
        self._sent_all = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._observer.watching(scope, self._record):
            work = asyncio.create_task(self._serve(scope, receive, send))
            gone = asyncio.create_task(_until_gone(receive))
            gone.add_done_callback(lambda _: self._sent_all or work.cancel())
            try:
                await work
            except asyncio.CancelledError:
                if not gone.done():
                    raise  # the server ends this, not the client
            finally:
                gone.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._place():
                await self._answer(scope, receive, send)
        except ApiError as error:  # nothing was sent yet
            await self._send_last(self._refusal(error), scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises `ApiError` before anything is sent."""
        answer = await self._cascade.answer(self._request, self._route, self._record)
        try:
            if self._request.stream:
                await self._send_stream(answer, send)
            else:
                await self._send_whole(answer, scope, receive, send)
        finally:
            await answer.attempt.aclose()
        self._record.end("answered")
        self._cascade.follow_up(self._request, answer)

    async def _send_stream(self, answer: Answer, send: Send) -> None:
        editor = Editor(self._request, self._record, answer.partial)
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", **self._record.headers()}
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        self._record.show()
        waiting = b"".join([editor.feed(event) for event in answer.held])
        try:
            if not answer.attempt.more_is_ready:
                waiting = await _send_body(send, waiting)
            async for event in answer.attempt:
                waiting += editor.feed(event)
                if not answer.attempt.more_is_ready:  # what came together leaves together: one write, not many
                    waiting = await _send_body(send, waiting)
            self._cascade.complete(self._request, self._route, answer)
            last = editor.end()
        except ApiError as error:  # too late for a status: an error event, and neither a finish_reason nor [DONE]
            self._fail(answer, error)
            last = encode(_dump(self._told(error)))
        self._sent_all = True
        await send({"type": "http.response.body", "body": waiting + last})

    async def _send_whole(self, answer: Answer, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer.held += [event async for event in answer.attempt]
        except ApiError as error:
            self._fail(answer, error)
            response = self._refusal(error)
        else:
            self._cascade.complete(self._request, self._route, answer)
            body = Editor(self._request, self._record, None).whole(answer.held[0])
            response = Response(body, headers=self._record.headers(), media_type="application/json")
        await self._send_last(response, scope, receive, send)

    async def _send_last(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_all = True  # from here on a server reports the end of the exchange as a client that is gone
        await response(scope, receive, send)

    def _fail(self, answer: Answer, error: ApiError) -> None:
        answer.attempt.record.decided("failed", error.code)
        self._record.reason = error.code
        self._record.end("failed")
        log.warning("answer failed: tier=%s reason=%s", answer.attempt.record.tier, error.code)

    def _refusal(self, error: ApiError) -> Response:
        self._record.reason = error.code
        self._record.end("failed" if error.status >= 500 else "refused")
        return JSONResponse(
            self._told(error), status_code=error.status, headers={**self._record.headers(), **error.headers()}
        )

    def _told(self, error: ApiError) -> dict[str, Any]:
        return {**error.body(), "kvlift": self._record.as_json()}


async def _send_body(send: Send, data: bytes) -> bytes:
    """Sends, and returns what is left to send: nothing."""
    if data:
        await send({"type": "http.response.body", "body": data, "more_body": True})
    return b""


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
