"""From rows to figures: a pure function of a run. The field names are the keys of `summary.json`.

Milliseconds. A quantile is over the requests of all seeds together, with the smallest and largest of the seeds beside
it. Failures count as later than every answer, and in every share; a quantile that falls on one is null.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from pydantic import BaseModel, ConfigDict, Field

from loadtest.lineup import in_order
from loadtest.predict import predict, service_of
from loadtest.rows import Row, after_warm_up, lag_fault, quantile
from loadtest.run import LARGE, Point, Run


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Mu(_Figures):
    """Requests per second. `ratio`: to the large model's native mu at the same length."""

    median: float
    lowest: float
    highest: float
    repeats: int
    method: str
    mean_batch: float | None
    ratio: float | None
    service_ms: dict[int, float] = Field(description="batch to the median of S(b)")


class SystemRow(_Figures):
    """One system at one load."""

    system: str
    u: float
    rate: float
    seeds: int
    requests: int = Field(description="that count: warm-up discarded, failures kept")
    ttft_median_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    ttft_median_spread_ms: tuple[float | None, float | None] = Field(description="smallest and largest of the seeds")
    ttft_p90_spread_ms: tuple[float | None, float | None]
    ttft_p99_spread_ms: tuple[float | None, float | None]
    speedup_median: float | None = Field(description="the large model's median over this one")
    speedup_p99: float | None
    mean_batch: float | None
    errors: int
    goodput: float = Field(description="share of all requests whose first token came within the limit")
    applied: float | None = Field(description="share of all requests whose lift was applied; null without lifts")
    escalated: float | None = Field(description="share of all requests that reached the large model; null if not told")
    lag_p99_ms: float | None
    valid: bool = Field(description="the generator held the rate in every seed")
    phases_ms: dict[str, float] = Field(description="means; what the worker told of its lifts")
    first_token_mean_ms: float | None
    simulated_median_ms: float | None = Field(description="of the same arrivals on a server with the measured S(b)")
    simulated_p99_ms: float | None
    simulated_batch: float | None


class Summary(_Figures):
    ttft_limit_ms: float
    mu: dict[int, dict[str, Mu]] = Field(description="by prompt length, then system")
    rows: list[SystemRow]
    missing: list[str] = Field(description="points that were planned and not finished")


def summarise(run: Run, rows: Iterable[Row], ttft_limit_s: float) -> Summary:
    """Only finished points count, and only those measured with the run's present settings and mu."""
    points = run.finished()
    by_point: dict[tuple[str, float | None, int], list[Row]] = {point.key: [] for point in points}
    for row in after_warm_up(rows, run.settings.warm_up):
        if (key := (row.system, row.u, row.seed)) in by_point:
            by_point[key].append(row)
    found: dict[tuple[str, float], SystemRow] = {}
    for system in in_order({point.system for point in points}):
        for u in sorted({point.u for point in points if point.system == system}):
            mine = [point for point in points if (point.system, point.u) == (system, u)]
            large = found.get((LARGE, u))
            found[system, u] = _system_row(run, mine, [by_point[point.key] for point in mine], ttft_limit_s, large)
    done = {point.key for point in points}
    return Summary(
        ttft_limit_ms=ttft_limit_s * 1000,
        mu=_mu(run),
        rows=list(found.values()),
        missing=["{}, u = {:g}, seed {}".format(*key) for key in run.planned if key not in done],
    )


def _system_row(
    run: Run, points: Sequence[Point], of_seed: Sequence[Sequence[Row]], ttft_limit_s: float, large: SystemRow | None
) -> SystemRow:
    """`of_seed`: the rows of each point. `large`: the large model's row at this load, None where there is none yet."""
    rows = [row for one in of_seed for row in one]
    at = {q: _quantile_ms(rows, q) for q in (0.5, 0.9, 0.99)}
    spread = {q: _spread([_quantile_ms(one, q) for one in of_seed]) for q in at}
    answered = [row.ttft_s for row in rows if row.ttft_s is not None]
    lifts = [row.lift for row in rows if row.lift is not None]
    escalated = [row.escalated for row in rows if row.escalated is not None]
    sizes = [point.mean_batch for point in points if point.mean_batch is not None]
    first = points[0]
    service = service_of(run, first.system)
    seeds = [point.seed for point in points]
    simulated = predict(run, service, first.rate, seeds) if service else None
    return SystemRow(
        system=first.system,
        u=first.u,
        rate=first.rate,
        seeds=len(points),
        requests=len(rows),
        ttft_median_ms=at[0.5],
        ttft_p90_ms=at[0.9],
        ttft_p99_ms=at[0.99],
        ttft_median_spread_ms=spread[0.5],
        ttft_p90_spread_ms=spread[0.9],
        ttft_p99_spread_ms=spread[0.99],
        speedup_median=_ratio(large.ttft_median_ms if large else None, at[0.5]),
        speedup_p99=_ratio(large.ttft_p99_ms if large else None, at[0.99]),
        mean_batch=fmean(sizes) if sizes else None,
        errors=sum(row.error is not None for row in rows),
        goodput=sum(seconds <= ttft_limit_s for seconds in answered) / len(rows) if rows else 0.0,
        applied=lifts.count("applied") / len(rows) if lifts else None,
        escalated=sum(escalated) / len(rows) if escalated else None,
        lag_p99_ms=_ms(quantile((row.lag_s for row in rows), 0.99)),
        valid=all(lag_fault(one) is None for one in of_seed),
        phases_ms=_mean_phases(rows),
        first_token_mean_ms=fmean(answered) * 1000 if answered else None,
        simulated_median_ms=_ms(simulated.median_s if simulated else None),
        simulated_p99_ms=_ms(simulated.p99_s if simulated else None),
        simulated_batch=simulated.mean_batch if simulated else None,
    )


def _mu(run: Run) -> dict[int, dict[str, Mu]]:
    found: dict[int, dict[str, Mu]] = {}
    for tokens in sorted({one.tokens for one in run.saturation}):
        here = {one.system: one for one in run.saturation if one.tokens == tokens}
        native = here.get(LARGE)
        found[tokens] = {
            name: Mu(
                median=one.mu,
                lowest=one.bounds[0],
                highest=one.bounds[1],
                repeats=len(one.repeats),
                method=one.method,
                mean_batch=one.mean_batch,
                ratio=one.mu / native.mu if native else None,
                service_ms={timed.batch: median(timed.seconds) * 1000 for timed in one.service},
            )
            for name in in_order(set(here))
            for one in [here[name]]
        }
    return found


def _mean_phases(rows: Sequence[Row]) -> dict[str, float]:
    """Means over all answered requests, in the order in which the phases came; what one did not have is 0 ms of it.

    The last call of a lift that was not applied is a native prefill, and goes by that name.
    """
    answered = [row for row in rows if row.error is None]
    total: dict[str, float] = {}
    for row in answered:
        for name, ms in row.phases_ms.items():
            called = "native_call" if name == "chat_call" and row.lift != "applied" else name
            total[called] = total.get(called, 0.0) + ms
    return {name: ms / len(answered) for name, ms in total.items()}


def _quantile_ms(rows: Sequence[Row], q: float) -> float | None:
    return _ms(quantile((row.ttft_s for row in rows), q))


def _spread(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    known = [value for value in values if value is not None]
    return min(known, default=None), None if len(known) < len(values) else max(known, default=None)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


def _ratio(large: float | None, this: float | None) -> float | None:
    return large / this if large and this else None
