"""What the simulator says of a run's systems, from their measured service times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from loadtest.rows import quantile
from loadtest.run import Run
from loadtest.schedule import poisson
from loadtest.simulate import Dispatch, Service, simulate


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds, over all seeds together, and requests per batch."""

    median_s: float
    p99_s: float
    mean_batch: float


def service_of(run: Run, system: str) -> Service | None:
    """S(b) at the run's prompt length, the median of the repeats; None where it was not measured."""
    for one in run.saturation:
        if (one.system, one.tokens) == (system, run.settings.tokens) and one.service:
            return Service([(timed.batch, median(timed.seconds)) for timed in one.service])
    return None


def predict(
    run: Run,
    service: Service,
    rate: float,
    seeds: Sequence[int],
    servers: int = 1,
    dispatch: Dispatch = "shortest",
) -> Predicted:
    """The very arrivals of a point with this rate and these seeds, warm-up discarded, on simulated servers."""
    ttft: list[float] = []
    batches: list[float] = []
    for seed in seeds:
        arrivals = [arrival.offset_s for arrival in poisson(rate, run.settings.requests, seed)]
        found = simulate(arrivals, service, servers=servers, dispatch=dispatch)
        ttft += found.ttft_s[run.settings.warm_up :]
        batches.append(found.mean_batch)
    return Predicted(quantile(ttft, 0.5) or 0.0, quantile(ttft, 0.99) or 0.0, fmean(batches))
