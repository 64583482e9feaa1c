"""The answer as the client sees it: one clean OpenAI answer, streamed or not, whoever gave it.

Rewrites, and no others: log-probabilities that only the policy asked for are left out; a usage chunk is sent
exactly when the client asked for one; the extension field `kvlift` is added to the last event. Every other event
of a streamed answer leaves as the worker sent it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from router.cascade import Answer, Cascade
from router.errors import ApiError
from router.events import ChatEvent
from router.record import Record
from router.request import ChatRequest
from router.routes import Route
from router.sse import DONE, encode
from router.traffic import InFlight

log = logging.getLogger(__name__)


class Editor:
    """Makes a worker's events the client's. The last event waits for the usage, which comes after it."""

    def __init__(self, request: ChatRequest, record: Record) -> None:
        self._request = request
        self._record = record
        self._last: ChatEvent | None = None  # the newest event with a finish_reason
        self._usage: ChatEvent | None = None

    def feed(self, event: ChatEvent) -> bytes:
        """What may be sent now; possibly nothing."""
        if event.is_usage_only:
            self._usage = event
            return b""
        sent = b"" if self._last is None else self._plain(self._last)
        self._last = event if event.finishes() else None
        return sent if event.finishes() else sent + self._plain(event)

    def end(self) -> bytes:
        """The last events of a complete stream."""
        if not self._request.wants_usage or self._usage is None:
            return self._extended(self._last) + encode(DONE)
        return self._plain(self._last) + self._extended(self._usage) + encode(DONE)

    def whole(self, event: ChatEvent) -> bytes:
        """A buffered answer."""
        event.show_logprobs(self._request.top_logprobs)
        return _dump({**event.body, "kvlift": self._record.as_json()}).encode()

    def _plain(self, event: ChatEvent | None) -> bytes:
        if event is None:
            return b""
        changed = event.show_logprobs(self._request.top_logprobs)
        return encode(_dump(event.body) if changed else event.raw)

    def _extended(self, event: ChatEvent | None) -> bytes:
        if event is None:
            return b""
        event.show_logprobs(self._request.top_logprobs)
        return encode(_dump({**event.body, "kvlift": self._record.as_json()}))


class Reply(Response):
    """Runs one request and sends its answer. A client that hangs up ends everything that runs for it."""

    def __init__(self, cascade: Cascade, request: ChatRequest, route: Route, in_flight: InFlight) -> None:
        super().__init__()
        self._cascade = cascade
        self._request = request
        self._route = route
        self._in_flight = in_flight
        self._record = Record()
        self._sent_all = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._serve(scope, receive, send))
        gone = asyncio.create_task(_until_gone(receive))
        gone.add_done_callback(lambda _: self._sent_all or work.cancel())
        try:
            await work
        except asyncio.CancelledError:
            log.info("request: outcome=cancelled %s", self._summary())
            if not gone.done():
                raise  # the server ends this, not the client
        else:
            log.info("request: outcome=done %s", self._summary())
        finally:
            gone.cancel()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._in_flight:
            try:
                answer = await self._cascade.answer(self._request, self._route, self._record)
            except ApiError as error:
                await self._send_last(self._refusal(error), scope, receive, send)
                return
            try:
                if self._request.stream:
                    await self._send_stream(answer, send)
                else:
                    await self._send_whole(answer, scope, receive, send)
            finally:
                await answer.attempt.aclose()
            self._cascade.follow_up(self._request, answer)

    async def _send_stream(self, answer: Answer, send: Send) -> None:
        editor = Editor(self._request, self._record)
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", **self._record.headers()}
        raw_headers = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw_headers})
        waiting = b"".join([editor.feed(event) for event in answer.held])
        try:
            if not answer.attempt.more_is_ready:
                waiting = await _send_body(send, waiting)
            async for event in answer.attempt:
                waiting += editor.feed(event)
                if not answer.attempt.more_is_ready:  # what came together leaves together: one write, not many
                    waiting = await _send_body(send, waiting)
            answer.attempt.record.end()
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
            answer.attempt.record.end()
            body = Editor(self._request, self._record).whole(answer.held[0])
            response = Response(body, headers=self._record.headers(), media_type="application/json")
        await self._send_last(response, scope, receive, send)

    async def _send_last(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_all = True  # from here on a server reports the end of the exchange as a client that is gone
        await response(scope, receive, send)

    def _fail(self, answer: Answer, error: ApiError) -> None:
        answer.attempt.record.decided("failed", error.code)
        log.warning("answer failed: tier=%s reason=%s", answer.attempt.record.tier, error.code)

    def _refusal(self, error: ApiError) -> Response:
        self._record.reason = error.code
        return JSONResponse(self._told(error), status_code=error.status, headers=self._record.headers())

    def _told(self, error: ApiError) -> dict[str, Any]:
        return {**error.body(), "kvlift": self._record.as_json()}

    def _summary(self) -> str:
        return " ".join(f"{name.removeprefix('x-kvlift-')}={value}" for name, value in self._record.headers().items())


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
