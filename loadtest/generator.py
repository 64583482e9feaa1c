"""The open loop: requests leave at their scheduled times, whatever the answers do.

One dispatcher sleeps until each absolute offset and spawns a greenlet for the arrival. Sleeping until a time, not for
a gap, keeps the rate when sending is slow. Everything waits through gevent by itself: nothing is monkey patched.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import gevent
from gevent.event import Event
from gevent.pool import Group

from loadtest.errors import CallFailed, NothingSucceeded, TargetDown, Unreachable
from loadtest.rows import Row
from loadtest.schedule import Arrival
from loadtest.systems import System

GRACE_S = 5.0
GIVE_UP_AFTER = 10


@dataclass(frozen=True, slots=True)
class Tags:
    """What every row of a run carries."""

    seed: int
    rate: float | None = None
    u: float | None = None


@dataclass(frozen=True, slots=True)
class Tally:
    """What a run came to. `stopped`: someone ended it before all had been sent or answered."""

    planned: int
    sent: int
    failed: int
    stopped: bool


class OpenLoop:
    """One run of one system. `on_row` is called with each row as its request ends."""

    def __init__(
        self,
        system: System,
        arrivals: Sequence[Arrival],
        prompts: Mapping[int, str],
        tags: Tags,
        on_row: Callable[[Row], None],
        give_up_after: int = GIVE_UP_AFTER,
        grace_s: float = GRACE_S,
    ) -> None:
        """arrivals: in order of time; prompts: by the arrival's index, made beforehand, so that sending costs little.

        give_up_after: so many failures to connect in a row end the run; grace_s: how long a stopped run waits for what
        is in flight.
        """
        self._system = system
        self._arrivals = arrivals
        self._prompts = prompts
        self._tags = asdict(tags)
        self._on_row = on_row
        self._give_up_after = give_up_after
        self._grace_s = grace_s
        self._in_flight = Group()
        self._ending = Event()
        self._start = 0.0
        self._sent = self._failed = self._unreachable = 0
        self._last_error = ""
        self._fault: Exception | None = None  # why the run ends early
        self._stopped = False

    def run(self, start: float | None = None) -> Tally:
        """Sends everything and waits for the answers; blocks this greenlet.

        start: when offset 0 is, of `time.perf_counter`; None for now. Raises `TargetDown` where the target cannot be
        reached, and `NothingSucceeded`; the rows so far have been given to `on_row`.
        """
        self._system.check()
        self._start = time.perf_counter() if start is None else start
        try:
            self._dispatch()
            answered = gevent.spawn(self._in_flight.join)
            gevent.wait([answered, self._ending], count=1)
            if self._ending.is_set():
                self._in_flight.join(timeout=self._grace_s)
        finally:
            self._in_flight.kill()
        if self._fault is not None:
            raise self._fault
        if self._failed and self._failed == self._sent and not self._stopped:
            raise NothingSucceeded(f"none of {self._sent} requests succeeded; the last one: {self._last_error}")
        return Tally(len(self._arrivals), self._sent, self._failed, self._stopped)

    def stop(self) -> None:
        """Sends no more; `run` returns when what is in flight has ended, or after the grace time."""
        self._stopped = True
        self._ending.set()

    def _dispatch(self) -> None:
        for arrival in self._arrivals:
            due = self._start + arrival.offset_s
            if due <= time.perf_counter():
                gevent.sleep(0)  # behind time: let those that were spawned begin
            while (left := due - time.perf_counter()) > 0 and not self._ending.is_set():
                self._ending.wait(left)
            if self._ending.is_set():
                return
            self._sent += 1
            self._in_flight.spawn(self._one, arrival).link_exception(self._broke)

    def _one(self, arrival: Arrival) -> None:
        sent_s = self._now()
        error: str | None = None
        answered: dict[str, Any] = {}
        try:
            answer = self._system.send(arrival, self._prompts[arrival.index])
            answered = asdict(answer)
            answered["first_token_s"] = answered.pop("first_token") - self._start
            answered["end_s"] = answered.pop("end") - self._start
            self._unreachable = 0
        except CallFailed as failure:
            error = str(failure)
            self._count(failure)
        except gevent.GreenletExit:
            error = "stopped before the answer was whole"
        if error is not None:
            self._failed += 1
            self._last_error = error
            answered = {"error": error, "end_s": self._now()}
        self._on_row(
            Row(
                system=self._system.name,
                **self._tags,
                index=arrival.index,
                scheduled_s=arrival.offset_s,
                sent_s=sent_s,
                **answered,
            )
        )

    def _count(self, failure: CallFailed) -> None:
        self._unreachable = self._unreachable + 1 if isinstance(failure, Unreachable) else 0
        if self._unreachable == self._give_up_after:
            self._end(TargetDown(f"{self._unreachable} requests in a row failed, the run ends here: {failure}"))

    def _broke(self, greenlet: gevent.Greenlet) -> None:
        self._end(greenlet.exception)

    def _end(self, fault: Exception) -> None:
        self._fault = self._fault or fault
        self._ending.set()

    def _now(self) -> float:
        return time.perf_counter() - self._start


@contextmanager
def stopping_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM call `stop` while inside; afterwards they do what they did before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    watchers = [gevent.signal_handler(number, stop) for number in before]
    try:
        yield
    finally:
        for watcher in watchers:
            watcher.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)
