"""A circuit breaker for the chat calls of one worker.

    closed     calls go through; `failures` failed ones in a row open it
    open       no call, but one per `interval_s` to try the worker
    probation  the worker has begun to answer a trial: calls go through, the first failure opens it again

A trial is an ordinary request. It holds its interval whatever becomes of it, so that one that is given up by its
client, or that hangs, keeps the worker neither shut nor flooded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal

from router.config import Breaker as Settings

log = logging.getLogger(__name__)

State = Literal["closed", "open"]


class Breaker:
    """Told of every call's outcome. `clock` gives seconds that never go back."""

    def __init__(self, name: str, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._failures = 0  # in a row
        self._next_trial: float | None = None  # None: closed

    @property
    def state(self) -> State:
        return "closed" if self._next_trial is None else "open"

    def may_call(self) -> bool:
        """Whether a call may be made now. Changes nothing."""
        return self.seconds_shut() == 0

    def seconds_shut(self) -> float:
        """Until the next call may be made."""
        return 0.0 if self._next_trial is None else max(self._next_trial - self._clock(), 0.0)

    def take(self) -> None:
        """A call is about to be made. While open, that is the trial of this interval."""
        if self._next_trial is not None:
            self._next_trial = self._clock() + self._settings.interval_s

    def began(self) -> None:
        """A worker has begun an answer: while open, it is on probation."""
        if self._next_trial is not None:
            self._next_trial = None
            self._failures = self._settings.failures - 1
            log.info("breaker closed: worker=%s", self._name)

    def succeeded(self) -> None:
        """A call has given what was asked of it."""
        self._failures = 0

    def failed(self) -> None:
        """A call has failed by the worker's fault."""
        self._failures += 1
        if self._next_trial is None and self._failures >= self._settings.failures:
            self._next_trial = self._clock() + self._settings.interval_s
            log.warning("breaker open: worker=%s failures=%d", self._name, self._failures)

    def reset(self) -> None:
        """What is behind it is another process now."""
        self.began()
        self._failures = 0
