"""A run's folder: `rows.jsonl`, one line per request, and `run.json`, everything else that a report needs.

`run.json` is written anew after each step, so that whatever ends a run, what was measured is kept.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadtest.errors import BadRun, NotMeasured
from loadtest.rows import Row, RowWriter, read_rows
from sglang_ext.identity import digest_fields

LARGE = "large"
"""The system that every other is compared with: native prefill on the target."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Settings(_Record):
    """What every point of a sweep has in common. Part of its digest."""

    tokens: int = Field(149, ge=2, description="length of each prompt, template included")
    requests: int = Field(500, ge=2, description="per point")
    warm_up: int = Field(50, ge=0, description="the first arrivals, which no figure counts")


class Served(_Record):
    """A worker under test."""

    url: str
    model: str
    model_digest: str
    threads: int | None = Field(None, description="that compute; None where it was not started by this run")

    @property
    def what(self) -> str:
        """What its speed depends on; its address does not matter."""
        return f"{self.model} {self.model_digest[:12]} on {self.threads or 'unknown'} threads"


class Machine(_Record):
    processor: str
    cores: int
    memory_gb: float
    python: str
    kvlift: str
    sglang: str


class BatchTime(_Record):
    """S(b): seconds that a batch of `batch` took, once per repeat; and in how many batches it went, where told."""

    batch: int
    seconds: list[float]
    batches: list[int | None]


class Saturation(_Record):
    """mu of one system at one prompt length, requests per second."""

    system: str
    tokens: int
    method: Literal["three_batches", "bisection"]
    repeats: list[float] = Field([], description="one per repeat, of equation 10")
    mean_batch: float | None = None
    service: list[BatchTime] = []
    stable: float | None = Field(None, description="bisection: the largest rate whose queue did not grow")
    unstable: float | None = Field(None, description="bisection: the smallest rate whose queue grew")

    @property
    def mu(self) -> float:
        """The median; of a bracket, its middle."""
        if self.stable is not None and self.unstable is not None:
            return (self.stable + self.unstable) / 2
        return median(self.repeats)

    @property
    def bounds(self) -> tuple[float, float]:
        """The smallest and largest repeat, or the bracket."""
        if self.stable is not None and self.unstable is not None:
            return self.stable, self.unstable
        return min(self.repeats), max(self.repeats)


class Point(_Record):
    """One finished measurement of a sweep. Its rows are those with its system, u and seed."""

    system: str
    u: float
    rate: float
    seed: int
    digest: str
    mean_batch: float | None
    counters: dict[str, float] = Field({}, description="what the worker counted meanwhile")
    seconds: float

    @property
    def key(self) -> tuple[str, float, int]:
        return self.system, self.u, self.seed


class Run(_Record):
    """All of `run.json`."""

    version: Literal[1] = 1
    settings: Settings
    machine: Machine
    target: Served
    source: Served | None = None
    saturation: list[Saturation] = []
    planned: list[tuple[str, float, int]] = Field([], description="the points that a sweep was asked for")
    points: list[Point] = []

    def saturation_of(self, system: str, tokens: int) -> Saturation | None:
        return next((one for one in self.saturation if (one.system, one.tokens) == (system, tokens)), None)

    @property
    def mu_target(self) -> float:
        """What u is a share of: the large model's native mu at the sweep's prompt length. Raises `NotMeasured`."""
        found = self.saturation_of(LARGE, self.settings.tokens)
        if found is None:
            raise NotMeasured(
                f"mu of {LARGE} at {self.settings.tokens} tokens has not been measured in this run; "
                "first `kvlift loadtest mu`, with the same folder and length"
            )
        return found.mu

    def digest(self) -> str:
        """Of what a point's figures depend on besides its system, u and seed, and that may change within a run.

        Raises `NotMeasured`.
        """
        return digest_fields([repr(self.settings), repr(self.mu_target)])[:16]

    def finished(self) -> list[Point]:
        """The points that belong together: those of the present settings and mu."""
        if self.saturation_of(LARGE, self.settings.tokens) is None:
            return []
        digest = self.digest()
        return [point for point in self.points if point.digest == digest]

    def with_saturation(self, one: Saturation) -> Run:
        others = [old for old in self.saturation if (old.system, old.tokens) != (one.system, one.tokens)]
        return self.model_copy(update={"saturation": [*others, one]})

    def with_point(self, one: Point) -> Run:
        others = [old for old in self.points if old.key != one.key]
        return self.model_copy(update={"points": [*others, one]})


class RunFolder:
    """Reads and writes a run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def begun(self) -> bool:
        return (self.path / "run.json").exists()

    def load(self) -> Run:
        """Raises `BadRun`."""
        file = self.path / "run.json"
        try:
            return Run.model_validate_json(file.read_bytes())
        except OSError as error:
            raise BadRun(f"{file}: {error.strerror}; expected the folder of a `kvlift loadtest` run") from error
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            raise BadRun(f"{file}: {'.'.join(map(str, fault['loc'])) or 'run'}: {fault['msg']}") from None

    def begin(self, fresh: Run) -> Run:
        """The run in this folder with the settings of `fresh`, or `fresh` itself; saved.

        Raises `BadRun` where what is there was measured on another machine, or on other models or threads.
        """
        if not self.begun:
            self.save(fresh)
            return fresh
        found = self.load()
        for what, old, new in (
            ("machine", found.machine, fresh.machine),
            ("target", found.target.what, fresh.target.what),
            ("source", found.source and found.source.what, fresh.source and fresh.source.what),
        ):
            if old != new:
                raise BadRun(f"{self.path} was measured with another {what} ({old}; now {new}); name another folder")
        run = found.model_copy(update={"settings": fresh.settings, "target": fresh.target, "source": fresh.source})
        self.save(run)
        return run

    def save(self, run: Run) -> None:
        """In one step: a reader finds the old file or the new one."""
        self._replace("run.json", run.model_dump_json(indent=1) + "\n")

    def rows(self) -> list[Row]:
        """All so far. Raises `BadRows`."""
        file = self.path / "rows.jsonl"
        return list(read_rows(file)) if file.exists() else []

    def writer(self) -> RowWriter:
        """Raises `BadRows`."""
        return RowWriter(self.path / "rows.jsonl")

    def forget(self, key: tuple[str, float, int]) -> None:
        """Drops the rows of a point that is measured again."""
        rows = self.rows()
        kept = [row for row in rows if (row.system, row.u, row.seed) != key]
        if len(kept) < len(rows):
            self._replace("rows.jsonl", "".join(row.model_dump_json() + "\n" for row in kept))

    def _replace(self, name: str, text: str) -> None:
        scratch = self.path / f"{name}.{os.getpid()}"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            scratch.write_text(text)
            scratch.replace(self.path / name)
        except OSError as error:
            raise BadRun(f"{self.path / name}: {error.strerror}; name a folder that can be written") from error
