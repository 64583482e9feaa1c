"""One record per request, one JSON line each, and what may be concluded from many.

Seconds are of one monotonic clock, 0 at the run's start.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from loadtest.errors import BadRows

LAG_SHARE = 0.05
"""A run is invalid when the p99 of its send lag is above this share of its median time to first token."""


class Row(BaseModel):
    """What happened to one request. Exactly one of `first_token_s` and `error` is set: a failure has no latency."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    system: str
    u: float | None = Field(None, description="arrival rate over the target's saturation throughput")
    rate: float | None = Field(None, description="arrivals per second; None for a replay")
    seed: int
    index: int = Field(ge=0, description="of the arrival, in order of schedule")
    scheduled_s: float
    sent_s: float
    first_token_s: float | None = None
    end_s: float
    tier: str | None = None
    escalated: bool | None = None
    lift: str | None = Field(None, description="applied, fallback_prefill, unsupported, none; None: was not told")
    lift_reason: str | None = None
    phases_ms: dict[str, float] = {}
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None

    @model_validator(mode="after")
    def _told_once(self) -> Self:
        if (self.first_token_s is None) == (self.error is None):
            raise ValueError("expected either first_token_s or error")
        return self

    @property
    def ttft_s(self) -> float | None:
        """Time to first token from the scheduled time; None for a failure."""
        return None if self.first_token_s is None else self.first_token_s - self.scheduled_s

    @property
    def total_s(self) -> float | None:
        """Time to the end of the answer from the scheduled time; None for a failure."""
        return None if self.error is not None else self.end_s - self.scheduled_s

    @property
    def lag_s(self) -> float:
        """How much later than scheduled the generator sent it."""
        return self.sent_s - self.scheduled_s


class RowWriter:
    """Appends rows to a file, each with one write: several processes may share a file, and a kill loses no row."""

    def __init__(self, path: Path) -> None:
        """Opens or creates the file and its folder. Raises `BadRows`."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise BadRows(f"{path}: {error.strerror}; name a file that can be written") from error

    def write(self, row: Row) -> None:
        os.write(self._file, row.model_dump_json().encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_rows(path: Path) -> Iterator[Row]:
    """Raises `BadRows` at a line that is no row."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                yield _parse(path, number, line)
    except OSError as error:
        raise BadRows(f"{path}: {error.strerror}; expected a file of rows, one JSON object per line") from error


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        return Row.model_validate_json(line)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(map(str, fault["loc"])) or "row"
        raise BadRows(f"{path}, line {number}: {key}: {fault['msg']}") from None


def after_warm_up(rows: Iterable[Row], discard: int) -> list[Row]:
    """The rows of arrivals number `discard` and later, whenever they ended; failures stay."""
    return [row for row in rows if row.index >= discard]


def quantile(values: Iterable[float | None], q: float) -> float | None:
    """The smallest value that at least a share `q` of all does not exceed. None counts as later than every number.

    Returns None where there is nothing, or where so many failed that the quantile is a failure.
    """
    ordered = sorted(math.inf if value is None else value for value in values)
    if not ordered:
        return None
    found = ordered[max(math.ceil(q * len(ordered)) - 1, 0)]
    return None if found == math.inf else found


def lag_fault(rows: Sequence[Row]) -> str | None:
    """Why the generator was too slow for these rows to count, or None where it was not."""
    lag = quantile((row.lag_s for row in rows), 0.99)
    median = quantile((row.ttft_s for row in rows), 0.5)
    if lag is None or median is None or lag <= LAG_SHARE * median:
        return None
    return (
        f"the p99 of the send lag is {lag * 1000:.1f} ms, above {LAG_SHARE:.0%} of the median time to first token, "
        f"{median * 1000:.1f} ms: the generator could not hold the rate"
    )
