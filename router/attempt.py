"""One answer of one worker: opened once it connects, read event by event, inside its limits."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Container
from typing import Any, TypeVar

import httpx
from opentelemetry.trace import SpanKind

from policies import Finish
from router.budget import Budget
from router.call import Call, Elsewhere
from router.config import Limits
from router.errors import UpstreamBroken, UpstreamError, UpstreamStatus, UpstreamTimeout
from router.events import AnswerEvent, Malformed
from router.record import AttemptRecord
from router.sse import DONE, SSEParser
from router.telemetry import tracing
from router.telemetry.attributes import describe_attempt
from router.whole import Whole
from router.worker import Worker

T = TypeVar("T")

_LAST_BYTES_S = 0.05  # for the end of the body after [DONE], so that the connection can be used again


def _nowhere(_: Container[Worker]) -> Worker | None:
    return None


class Attempt:
    """One worker's answer. An iterator over its events, in order, as they come.

    It ends after a complete answer only; an answer that is cut or wrong raises. The owner calls `aclose()`.
    """

    def __init__(
        self,
        worker: Worker,
        path: str,
        body: dict[str, Any],
        limits: Limits,
        budget: Budget,
        record: AttemptRecord,
        elsewhere: Elsewhere = _nowhere,
    ) -> None:
        """`elsewhere` is asked where there is no connection to the worker, and for retries."""
        self.record = record
        self.whole = Whole()
        self._span = tracing.begin(f"attempt {record.tier}", SpanKind.CLIENT)
        self._call = Call(worker, elsewhere, limits, budget, record)
        self._stream = bool(body.get("stream"))
        self._path = path
        self._content = json.dumps(body).encode()
        self._limits = limits
        self._budget = budget
        self._response: httpx.Response | None = None
        self._started = time.monotonic()
        self._parser = SSEParser()
        self._ready: deque[str] = deque()  # data of the events that have come and were not asked for yet
        self._at_end = False
        self._committed = False
        self._saw_content = False
        self._open_choices: set[int] = set()
        self._finished: dict[int, str] = {}

    def commit(self) -> None:
        """There is no other answer to turn to: `attempt_s` no longer bounds this one."""
        self._committed = True

    def finish(self) -> Finish:
        """The end of the answer, once it is complete."""
        return self.whole.finish(next(iter(self._finished.values()), ""))

    @property
    def more_is_ready(self) -> bool:
        """True where the next event has come already."""
        return bool(self._ready)

    def __aiter__(self) -> Attempt:
        return self

    async def __anext__(self) -> AnswerEvent:
        """The next event. Raises `UpstreamError`, or `Unavailable` where no call is left."""
        if self._response is None:
            with tracing.within(self._span):
                self._response = await self._call.open(self._path, self._content, self._within_limits)
            self._chunks = self._response.aiter_bytes()
        try:
            event = await self._next()
        except UpstreamError as error:
            self._call.blame(error)
            raise
        if event is None:
            raise StopAsyncIteration
        return event

    @property
    def worker(self) -> Worker:
        """The one that answers; another than at first where that could not be asked."""
        return self._call.worker

    async def aclose(self) -> None:
        """Ends the call. Where it still runs, the worker sees the connection close and aborts."""
        self._call.close()
        if self._span.is_recording():
            describe_attempt(self._span, self.record)
            self._span.end()
        if self._response is None:
            return
        if self._at_end:
            await self._read_last_bytes()
        await self._response.aclose()

    async def _next(self) -> AnswerEvent | None:
        """The next event, None after the last one of a complete answer."""
        if not self._ready and not self._at_end:
            await self._within_limits(self._read())
        if self._ready:
            event = self._parsed(self._ready.popleft())
            self._note(event)
            return event
        if not self._is_complete():
            raise UpstreamBroken(self.worker.name, "truncated", "the answer ended without a finish_reason")
        return None

    async def _within_limits(self, step: Awaitable[T]) -> T:
        limit, seconds, ends_at = min(self._bounds(), key=lambda bound: bound[2])
        try:
            async with asyncio.timeout(ends_at - time.monotonic()):
                return await step
        except TimeoutError as error:
            raise UpstreamTimeout(self.worker.name, limit, seconds) from error

    def _bounds(self) -> list[tuple[str, float, float]]:
        """The limits that hold now: key, seconds, and the time of the monotonic clock at which each is reached."""
        limits = self._limits
        bounds = [("total_s", limits.total_s, self._budget.ends_at)]
        if not self._committed:
            bounds.append(("attempt_s", limits.attempt_s, self._started + limits.attempt_s))
        if self._stream and self._saw_content:
            bounds.append(("idle_s", limits.idle_s, time.monotonic() + limits.idle_s))
        elif self._stream:
            bounds.append(("first_token_s", limits.first_token_s, self._started + limits.first_token_s))
        return bounds

    async def _read(self) -> None:
        """Reads until an event is ready or the answer has ended."""
        await (self._read_streamed() if self._stream else self._read_buffered())

    async def _read_streamed(self) -> None:
        while not self._ready and not self._at_end:
            chunk = await self._chunk()
            if chunk is None:
                self._at_end = True
                return
            for data in self._parser.feed(chunk):
                if data == DONE:
                    self._at_end = True
                    return
                self._ready.append(data)

    async def _read_buffered(self) -> None:
        parts: list[bytes] = []
        while (chunk := await self._chunk()) is not None:
            parts.append(chunk)
        self._at_end = True
        self._ready.append(b"".join(parts).decode(errors="replace"))

    async def _chunk(self) -> bytes | None:
        try:
            return await anext(self._chunks, None)
        except httpx.TransportError as error:
            if self._is_complete():  # a cut after the last finish_reason took nothing of the answer
                return None
            raise UpstreamBroken(self.worker.name, "connection_lost", f"the answer was cut: {error!r}") from error

    def _parsed(self, data: str) -> AnswerEvent:
        try:
            event = AnswerEvent(data)
        except Malformed as error:
            raise UpstreamBroken(self.worker.name, "malformed", str(error)) from error
        if event.error is not None:
            raise self._told(event)
        if "abort" in event.finishes().values():
            raise UpstreamBroken(self.worker.name, "aborted", "the worker aborted the answer")
        return event

    def _told(self, event: AnswerEvent) -> UpstreamError:
        code = event.error.get("code") if isinstance(event.error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return UpstreamStatus(self.worker.name, status, event.body)

    def _note(self, event: AnswerEvent) -> None:
        self._call.begin()
        self._open_choices |= event.indices()
        self._finished |= event.finishes()
        self.whole.add(event)
        if event.usage is not None:
            self.record.set_usage(event.usage)
        if not self._saw_content and event.has_content():
            self._saw_content = True
            if self._stream:
                self.record.first_token()

    def _is_complete(self) -> bool:
        return bool(self._finished) and self._open_choices == self._finished.keys()

    async def _read_last_bytes(self) -> None:
        try:
            async with asyncio.timeout(_LAST_BYTES_S):
                while await self._chunk() is not None:
                    pass
        except TimeoutError:
            return  # then the connection is closed, which costs only a new one
