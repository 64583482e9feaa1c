"""The sweep: every system at every load, the same arrivals and prompts for all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from loadtest.bench import Bench
from loadtest.generator import Tags
from loadtest.progress import Progress
from loadtest.rows import Row, after_warm_up, quantile
from loadtest.run import Point, Run, RunFolder
from loadtest.schedule import poisson

PointKey = tuple[str, float, int]
"""System, u, seed."""


@dataclass(frozen=True)
class Plan:
    """What a sweep was asked for."""

    systems: Sequence[str]
    us: Sequence[float]
    seeds: Sequence[int]

    def points(self) -> Iterator[PointKey]:
        """Seed by seed, load by load, the systems within: a slow hour of the machine hits all of them alike."""
        return ((system, u, seed) for seed in self.seeds for u in self.us for system in self.systems)


def left_of(plan: Plan, run: Run) -> list[PointKey]:
    """The points that have not been measured with these settings and this mu."""
    done = {point.key for point in run.finished()}
    return [key for key in plan.points() if key not in done]


def seconds_of(points: Sequence[PointKey], run: Run) -> float:
    """How long the arrivals of these points take; draining and prefilling come on top. Raises `NotMeasured`."""
    return sum(run.settings.requests / (u * run.mu_target) for _, u, _ in points)


def sweep(bench: Bench, folder: RunFolder, plan: Plan, progress: Progress) -> None:
    """Measures what is left, and keeps each row and each finished point at once.

    `run.json` must hold mu of the target. Raises what `Bench` does; the rows of the point in progress are kept, and
    replaced when the sweep goes on. `progress` advances by the seconds of `seconds_of`.
    """
    for system in plan.systems:
        bench.entry(system)  # what is wrong with one is said before the first is measured
    run = folder.load()
    run = run.model_copy(update={"planned": sorted({*run.planned, *plan.points()})})
    folder.save(run)
    for key in left_of(plan, run):
        folder.forget(key)
        progress.show("{}, u = {:g}, seed {}".format(*key))
        point = _measure(bench, folder, run, key, progress)
        run = run.with_point(point)
        folder.save(run)


def _measure(bench: Bench, folder: RunFolder, run: Run, key: PointKey, progress: Progress) -> Point:
    name, u, seed = key
    settings, rate = run.settings, u * run.mu_target
    tested = bench.entry(name)
    arrivals = poisson(rate, settings.requests, seed)
    texts = bench.texts(arrivals, seed, settings.tokens)
    bench.prepare(tested, texts)
    started = time.monotonic()
    with folder.writer() as writer:

        def keep(row: Row) -> None:
            writer.write(row)
            progress.advance(1 / rate)

        load = bench.load(tested, arrivals, texts, Tags(seed=seed, rate=rate, u=u), keep)
    median = quantile((row.ttft_s for row in after_warm_up(load.rows, settings.warm_up)), 0.5)
    found = "most requests failed" if median is None else f"median time to first token {median * 1000:,.0f} ms"
    progress.note(f"{name}, u = {u:g}, seed {seed}: {found}")
    return Point(
        system=name,
        u=u,
        rate=rate,
        seed=seed,
        digest=run.digest(),
        mean_batch=load.counted.mean_batch,
        counters=dict(load.counted.values),
        seconds=time.monotonic() - started,
    )
