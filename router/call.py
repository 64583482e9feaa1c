"""Finds a worker of a tier that takes a call, and tells the workers' breakers how their calls went.

The only retry loop of the router is here, and it ends before the first event.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Container
from contextlib import ExitStack

import httpx

from router.budget import Budget
from router.config import Limits
from router.errors import UpstreamError, UpstreamRefused
from router.record import AttemptRecord
from router.worker import Worker

Elsewhere = Callable[[Container[Worker]], Worker | None]
"""Another worker with the same answer, in place of those that have failed."""

Within = Callable[[Awaitable[httpx.Response]], Awaitable[httpx.Response]]
"""Waits, inside the limits that hold now. Raises `UpstreamTimeout`."""

_FIRST_PAUSE_S = 0.1


class Call:
    """One call, and whom it was made to. Counts as in flight there until `close`."""

    def __init__(
        self, worker: Worker, elsewhere: Elsewhere, limits: Limits, budget: Budget, record: AttemptRecord
    ) -> None:
        self._tried: list[Worker] = []
        self._elsewhere = elsewhere
        self._retries = limits.retries
        self._budget = budget
        self._record = record
        self._counted = ExitStack()
        self._has_begun = False
        self._is_faultless = True
        self._go_to(worker)

    @property
    def worker(self) -> Worker:
        """The one that was asked last."""
        return self._tried[-1]

    async def open(self, path: str, content: bytes, within: Within) -> httpx.Response:
        """The answer's beginning. Where there is no connection and another worker, that costs no retry.

        Raises `UpstreamError`, or `Unavailable` where no call is left.
        """
        retries = 0
        while True:
            self._budget.take_call()
            self._is_faultless = True
            self._counted.close()
            self._counted.enter_context(self.worker.in_flight)
            try:
                return await within(self.worker.open(path, content))
            except UpstreamError as error:
                self.blame(error)
                if not error.transient or not self._budget.may_call():
                    raise
                if isinstance(error, UpstreamRefused) and self._moves():
                    continue
                pause = _FIRST_PAUSE_S * 2**retries * random.uniform(0.5, 1.0)
                if retries >= self._retries or pause >= self._budget.seconds_left():
                    raise
            retries += 1
            await asyncio.sleep(pause)
            self._moves()

    def begin(self) -> None:
        """The answer has begun to come."""
        if not self._has_begun:
            self._has_begun = True
            self.worker.breaker.began()

    def blame(self, error: UpstreamError) -> None:
        """The call has failed."""
        if error.blames:
            self._is_faultless = False
            self.worker.breaker.failed()

    def close(self) -> None:
        """The call is over: well, where an answer had begun and nothing failed."""
        self._counted.close()
        if self._has_begun and self._is_faultless:
            self.worker.breaker.succeeded()

    def _moves(self) -> bool:
        """Turns to another worker where there is one."""
        other = self._elsewhere(self._tried)
        if other is not None:
            self._go_to(other)
        return other is not None

    def _go_to(self, worker: Worker) -> None:
        self._tried.append(worker)
        self._record.worker = worker.name
