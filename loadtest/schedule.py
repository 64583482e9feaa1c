"""When requests arrive: drawn before a run, as absolute times, the same for every system that is compared.

A schedule is unit gaps (mean 1) divided by a rate. The unit gaps depend on the seed and the spread alone, so that two
rates share their randomness: twice the rate is the same trace in half the time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from loadtest.errors import BadSchedule


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request to come: `offset_s` seconds after the run's start. A replay also knows the lengths of both texts."""

    index: int
    offset_s: float
    context_tokens: int | None = None
    output_tokens: int | None = None


def poisson(rate: float, count: int, seed: int) -> list[Arrival]:
    """A homogeneous Poisson process of `rate` arrivals per second. Raises `BadSchedule`."""
    return gamma(rate, count, seed, cv=1.0)


def gamma(rate: float, count: int, seed: int, cv: float) -> list[Arrival]:
    """Gamma gaps with coefficient of variation `cv`: above 1 bursty, 1 Poisson, below 1 calm. Raises `BadSchedule`."""
    if not (0 < cv < math.inf):
        raise BadSchedule(f"a coefficient of variation of {cv:g}; expected one above 0 (1 is Poisson)")
    rng = random.Random(seed)
    shape = 1 / cv**2
    return _renewal(rate, count, (rng.gammavariate(shape, 1 / shape) for _ in range(count)))


def constant(rate: float, count: int) -> list[Arrival]:
    """Equal gaps. Raises `BadSchedule`."""
    return _renewal(rate, count, repeat(1.0, count))


def at_once(count: int) -> list[Arrival]:
    """All at the start: a queue that never runs dry. Raises `BadSchedule`."""
    return _renewal(1.0, count, repeat(0.0, count))


def replay(trace: Sequence[Arrival], scale: float, count: int | None = None) -> list[Arrival]:
    """The first `count` arrivals of a recorded trace, `scale` times as fast as recorded. Raises `BadSchedule`."""
    if not (0 < scale < math.inf):
        raise BadSchedule(f"a rate scale of {scale:g}; expected one above 0 (1 is as recorded)")
    if count is not None and not 0 < count <= len(trace):
        raise BadSchedule(f"{count} arrivals of a trace that holds {len(trace)}; ask for 1 to {len(trace)}")
    return [replace(arrival, offset_s=arrival.offset_s / scale) for arrival in trace[:count]]


def share(arrivals: Iterable[Arrival], worker: int, workers: int) -> list[Arrival]:
    """The arrivals that worker number `worker` (from 0) of `workers` sends: all shares together are the schedule."""
    return [arrival for arrival in arrivals if arrival.index % workers == worker]


class Schedule(BaseModel):
    """A schedule by name, as options and configurations give it.

    kind    uses
    poisson rate, count
    gamma   rate, count, cv
    constant rate, count
    trace   trace (a file, see `loadtest.traces`), scale, and count where only the start is wanted
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["poisson", "constant", "gamma", "trace"] = "poisson"
    rate: float = Field(1.0, description="arrivals per second")
    count: int | None = Field(None, description="arrivals in all")
    cv: float = Field(2.0, description="coefficient of variation of the gaps")
    trace: Path | None = None
    scale: float = Field(1.0, description="how many times as fast as recorded")

    def arrivals(self, seed: int) -> list[Arrival]:
        """Raises `BadSchedule`, or `BadTrace` for the trace's file."""
        if self.kind == "trace":
            return self._replayed()
        if self.count is None:
            raise BadSchedule(f"no count for a {self.kind} schedule; say how many arrivals")
        match self.kind:
            case "poisson":
                return poisson(self.rate, self.count, seed)
            case "gamma":
                return gamma(self.rate, self.count, seed, self.cv)
            case "constant":
                return constant(self.rate, self.count)

    def _replayed(self) -> list[Arrival]:
        from loadtest.traces import read_trace

        if self.trace is None:
            raise BadSchedule("no file for a trace schedule; name the CSV")
        return replay(read_trace(self.trace), self.scale, self.count)


def _renewal(rate: float, count: int, unit_gaps: Iterable[float]) -> list[Arrival]:
    if not (0 < rate < math.inf):
        raise BadSchedule(f"a rate of {rate:g} arrivals per second; expected one above 0")
    if count < 1:
        raise BadSchedule(f"{count} arrivals; expected 1 or more")
    return [Arrival(index, unit / rate) for index, unit in enumerate(accumulate(unit_gaps))]
