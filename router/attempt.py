"""One chat call to one worker: opened once it connects, read event by event, inside its limits.

The only retry loop of the router is here, and it ends before the first event.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import deque
from collections.abc import Awaitable
from contextlib import ExitStack
from typing import Any, TypeVar

import httpx

from policies import Finish
from router.config import Limits
from router.errors import Unavailable, UpstreamBroken, UpstreamError, UpstreamStatus, UpstreamTimeout
from router.events import ChatEvent, Malformed
from router.record import AttemptRecord
from router.sse import DONE, SSEParser
from router.whole import Whole
from router.worker import Worker

T = TypeVar("T")

_FIRST_PAUSE_S = 0.1
_LAST_BYTES_S = 0.05  # for the end of the body after [DONE], so that the connection can be used again


class Budget:
    """What is left for one client request: time, and chat calls to workers."""

    def __init__(self, limits: Limits) -> None:
        self._max_calls = self._calls = limits.max_calls
        self.ends_at = time.monotonic() + limits.total_s

    def take_call(self) -> None:
        """Raises `Unavailable` when the calls are used up."""
        if not self.may_call():
            raise Unavailable(
                f"limits.max_calls is {self._max_calls}: so many chat calls were made and none answered",
                code="max_calls",
            )
        self._calls -= 1

    def may_call(self) -> bool:
        return self._calls > 0

    @property
    def calls_left(self) -> int:
        return self._calls

    @property
    def calls_used(self) -> int:
        return self._max_calls - self._calls

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()


class Attempt:
    """One worker's answer. An iterator over its events, in order, as they come.

    It ends after a complete answer only; an answer that is cut or wrong raises. The owner calls `aclose()`.
    """

    def __init__(
        self, worker: Worker, body: dict[str, Any], limits: Limits, budget: Budget, record: AttemptRecord
    ) -> None:
        self.record = record
        self.whole = Whole()
        self._worker = worker
        self._stream = bool(body.get("stream"))
        self._content = json.dumps(body).encode()
        self._limits = limits
        self._budget = budget
        self._response: httpx.Response | None = None
        self._counted = ExitStack()
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

    async def __anext__(self) -> ChatEvent:
        """The next event. Raises `UpstreamError`, or `Unavailable` where no call is left."""
        if self._response is None:
            self._counted.enter_context(self._worker.in_flight)
            self._response = await self._open()
            self._chunks = self._response.aiter_bytes()
        if not self._ready and not self._at_end:
            await self._within_limits(self._read())
        if self._ready:
            event = self._parsed(self._ready.popleft())
            self._note(event)
            return event
        if not self._is_complete():
            raise UpstreamBroken(self._worker.name, "truncated", "the answer ended without a finish_reason")
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Ends the call. Where it still runs, the worker sees the connection close and aborts."""
        self._counted.close()
        if self._response is None:
            return
        if self._at_end:
            await self._read_last_bytes()
        await self._response.aclose()

    async def _open(self) -> httpx.Response:
        retries = 0
        while True:
            self._budget.take_call()
            try:
                return await self._within_limits(self._worker.open_chat(self._content))
            except UpstreamError as error:
                pause = _FIRST_PAUSE_S * 2**retries * random.uniform(0.5, 1.0)
                fits = self._budget.may_call() and pause < self._budget.seconds_left()
                if not error.transient or retries >= self._limits.retries or not fits:
                    raise
            retries += 1
            await asyncio.sleep(pause)

    async def _within_limits(self, step: Awaitable[T]) -> T:
        limit, seconds, ends_at = min(self._bounds(), key=lambda bound: bound[2])
        try:
            async with asyncio.timeout(ends_at - time.monotonic()):
                return await step
        except TimeoutError as error:
            raise UpstreamTimeout(self._worker.name, limit, seconds) from error

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
            raise UpstreamBroken(self._worker.name, "connection_lost", f"the answer was cut: {error!r}") from error

    def _parsed(self, data: str) -> ChatEvent:
        try:
            event = ChatEvent(data)
        except Malformed as error:
            raise UpstreamBroken(self._worker.name, "malformed", str(error)) from error
        if event.error is not None:
            raise self._told(event)
        if "abort" in event.finishes().values():
            raise UpstreamBroken(self._worker.name, "aborted", "the worker aborted the answer")
        return event

    def _told(self, event: ChatEvent) -> UpstreamError:
        code = event.error.get("code") if isinstance(event.error, dict) else None
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        return UpstreamStatus(self._worker.name, status, event.body)

    def _note(self, event: ChatEvent) -> None:
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
