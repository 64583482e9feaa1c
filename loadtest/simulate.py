"""A fleet of first-come-first-served batch servers, reckoned instead of run.

The scheduler of the paper's appendix B.3: a server that becomes idle takes up to `cap` of its waiting requests, oldest
first, and answers all of them S(b) seconds later, b being how many it took. Fed with measured S(b), it says what a
measured curve should look like, and goes on where nothing can be measured: other rates, and several servers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Literal

from loadtest.errors import BadSchedule

CAP = 32
"""Requests in a batch, at most: the paper's figure, and what SGLang is told by --prefill-max-requests."""

Dispatch = Literal["shortest", "round_robin"]
"""How a fleet shares its arrivals: to the server with the fewest requests in it, or to each in turn."""


class Service:
    """S(b), the seconds that a batch of b takes: straight lines between measured points.

    Below the first point it is the first's, beyond the last one the last line goes on.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        """`points`: (batch, seconds), each batch once. Raises `BadSchedule`."""
        self._points = sorted(points)
        batches = [batch for batch, _ in self._points]
        fine = all(batch >= 1 and 0 <= seconds < math.inf for batch, seconds in self._points)
        if not self._points or not fine or len(set(batches)) < len(batches):
            raise BadSchedule(
                f"service times {list(points)}; expected (batch, seconds), each batch once and at least 1"
            )
        self._batches = batches

    def __call__(self, batch: float) -> float:
        points = self._points
        if batch <= points[0][0] or len(points) == 1:
            return points[0][1]
        right = min(bisect_left(self._batches, batch), len(points) - 1)
        (b0, s0), (b1, s1) = points[right - 1], points[right]
        return s0 + (s1 - s0) * (batch - b0) / (b1 - b0)


@dataclass(frozen=True, slots=True)
class Simulated:
    """`ttft_s`: of each arrival, in their order. `batches`: the size of each batch, over all servers, as they began."""

    ttft_s: list[float]
    batches: list[int]

    @property
    def mean_batch(self) -> float:
        return sum(self.batches) / len(self.batches)


def simulate(
    arrivals: Sequence[float],
    service: Callable[[int], float],
    cap: int = CAP,
    servers: int = 1,
    dispatch: Dispatch = "shortest",
) -> Simulated:
    """`arrivals`: seconds, ascending; those of one moment are all there when a batch begins. Raises `BadSchedule`."""
    if not arrivals or any(late > early for early, late in zip(arrivals[1:], arrivals)):
        raise BadSchedule("no arrivals, or some earlier than the one before; expected seconds in ascending order")
    if cap < 1 or servers < 1:
        raise BadSchedule(f"batches of {cap}, {servers} servers; expected at least 1 of each")
    ends = [0.0] * len(arrivals)
    batches: list[tuple[float, int]] = []
    fleet = [_Server(service, cap, ends, batches) for _ in range(servers)]
    turns = cycle(fleet)
    for index, now in enumerate(arrivals):
        for server in fleet:
            server.advance(now)
        chosen = next(turns) if dispatch == "round_robin" else min(fleet, key=lambda one: one.holds(now))
        chosen.waiting.append((now, index))
    for server in fleet:
        server.advance(math.inf)
    ttft = [end - start for start, end in zip(arrivals, ends)]
    return Simulated(ttft, [size for _, size in sorted(batches)])


class _Server:
    """Its batches are reckoned up to a moment; `ends` and `batches` are shared by the fleet and written to."""

    def __init__(
        self, service: Callable[[int], float], cap: int, ends: list[float], batches: list[tuple[float, int]]
    ) -> None:
        self.waiting: deque[tuple[float, int]] = deque()
        self._service = service
        self._cap = cap
        self._ends = ends
        self._batches = batches
        self._free = 0.0
        self._serving = 0  # the size of the last batch

    def advance(self, now: float) -> None:
        """Begins every batch that begins before `now`; one that begins at `now` waits for who else comes then."""
        while self.waiting and (start := max(self._free, self.waiting[0][0])) < now:
            # All that wait have come by `start`: the server is brought up to date at each arrival.
            taken = [self.waiting.popleft()[1] for _ in range(min(len(self.waiting), self._cap))]
            self._free = start + self._service(len(taken))
            self._serving = len(taken)
            self._batches.append((start, len(taken)))
            for index in taken:
                self._ends[index] = self._free

    def holds(self, now: float) -> int:
        """How many requests wait or are served."""
        return len(self.waiting) + (self._serving if self._free > now else 0)
