"""The simulator against queueing theory."""

from __future__ import annotations

import random
from itertools import pairwise
from math import sqrt
from statistics import fmean, stdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import BadSchedule
from loadtest.schedule import at_once, poisson
from loadtest.simulate import CAP, Service, Simulated, simulate

CURVE = Service([(1, 0.10), (2, 0.15), (8, 0.40), (32, 1.30)])
GAPS = st.lists(st.floats(0, 3, allow_nan=False), min_size=1, max_size=60)


def times(rate: float, count: int, seed: int = 0) -> list[float]:
    return [arrival.offset_s for arrival in poisson(rate, count, seed)]


def one(rate: float, **more: int) -> Simulated:
    return simulate(times(rate, 4000), CURVE, **more)


def added(gaps: list[float]) -> list[float]:
    """Arrival times on a grid, so that some fall together."""
    total, out = 0.0, []
    for gap in gaps:
        total += round(gap * 4) / 4
        out.append(total)
    return out


def test_mean_wait_of_m_d_1():
    """W = rho S / (2 (1 - rho)), within four standard errors over independent runs."""
    service_s, load = 1.0, 0.7
    waits = []
    for seed in range(30):
        ttft = simulate(times(load / service_s, 4000, seed), lambda _: service_s, cap=1).ttft_s
        waits.append(fmean(ttft[500:]) - service_s)
    theory = load * service_s / (2 * (1 - load))
    assert abs(fmean(waits) - theory) < 4 * stdev(waits) / sqrt(len(waits))


@settings(deadline=None)
@given(GAPS, st.sampled_from([0.25, 0.5, 1.0, 2.0]))
def test_one_at_a_time_is_lindleys_recursion(gaps: list[float], service_s: float):
    """wait(n + 1) = max(0, wait(n) + S - gap); exact, the times being binary fractions."""
    arrivals = added(gaps)
    wait, expected = 0.0, [service_s]
    for early, late in pairwise(arrivals):
        wait = max(0.0, wait + service_s - (late - early))
        expected.append(wait + service_s)
    found = simulate(arrivals, lambda _: service_s, cap=1)
    assert found.ttft_s == expected
    assert found.batches == [1] * len(arrivals)


@settings(deadline=None)
@given(GAPS, st.integers(1, 5), st.integers(1, 4), st.sampled_from(["shortest", "round_robin"]))
def test_every_request_is_in_one_batch_that_takes_its_time(gaps: list[float], cap: int, servers: int, dispatch):
    arrivals = added(gaps)
    found = simulate(arrivals, CURVE, cap, servers, dispatch)
    assert sum(found.batches) == len(arrivals) == len(found.ttft_s)
    assert 1 <= min(found.batches) and max(found.batches) <= cap
    assert min(found.ttft_s) >= CURVE(1) - 1e-9


@settings(deadline=None)
@given(GAPS, st.integers(1, 5))
def test_first_come_first_served(gaps: list[float], cap: int):
    arrivals = added(gaps)
    ends = [start + ttft for start, ttft in zip(arrivals, simulate(arrivals, CURVE, cap).ttft_s)]
    assert all(late >= early - 1e-9 for early, late in pairwise(ends))


@settings(deadline=None)
@given(GAPS)
def test_a_constant_service_time_never_waits_longer_when_arrivals_spread(gaps: list[float]):
    """The same trace at half the rate: no request waits longer. (One at a time: batches make no such promise.)"""
    arrivals = added(gaps)
    dense = simulate(arrivals, lambda _: 1.0, cap=1).ttft_s
    sparse = simulate([2 * time for time in arrivals], lambda _: 1.0, cap=1).ttft_s
    assert all(slow <= fast for slow, fast in zip(sparse, dense))


def test_the_mean_grows_with_the_rate():
    means = [fmean(one(rate).ttft_s) for rate in (1, 4, 10, 16, 20, 24)]
    assert means == sorted(means)


@pytest.mark.parametrize("rate", [12, 16, 20])
def test_the_mean_batch_is_what_arrives_during_one(rate: float):
    """Appendix B.3: b* = lambda S(b*), once the server is hardly ever idle."""
    mean = one(rate).mean_batch
    assert mean == pytest.approx(rate * CURVE(mean), rel=0.1)


def test_it_saturates_at_full_batches():
    """32 / S(32) requests a second leave, however many more arrive."""
    for rate in (1.3, 2.0):
        count, arrivals = 4000, times(rate * CAP / CURVE(CAP), 4000)
        found = simulate(arrivals, CURVE)
        leaving = count / max(start + ttft for start, ttft in zip(arrivals, found.ttft_s))
        assert leaving == pytest.approx(CAP / CURVE(CAP), rel=0.02)


def test_below_saturation_what_arrives_leaves():
    found = one(0.9 * CAP / CURVE(CAP))
    assert max(found.ttft_s) < 4 * CURVE(CAP)


def test_all_at_once_are_full_batches():
    """Equation 10 in the simulator: three maximum batches back to back."""
    found = simulate([arrival.offset_s for arrival in at_once(3 * CAP)], CURVE)
    assert found.batches == [CAP] * 3
    assert max(found.ttft_s) == pytest.approx(3 * CURVE(CAP))


def test_an_equal_share_is_served_as_alone():
    """Round robin over n servers is n servers that each get every n-th arrival."""
    arrivals = times(30, 900)
    fleet = simulate(arrivals, CURVE, servers=3, dispatch="round_robin").ttft_s
    for first in range(3):
        assert fleet[first::3] == simulate(arrivals[first::3], CURVE).ttft_s


def test_the_shortest_queue_waits_less_than_turns():
    """With service times drawn by lot. (Constant ones favour turns, which space the arrivals.)"""

    def mean_ttft(dispatch) -> float:
        rng = random.Random(0)
        return fmean(simulate(times(2.4, 6000), lambda _: rng.expovariate(1), 1, 3, dispatch).ttft_s)

    assert mean_ttft("shortest") < 0.9 * mean_ttft("round_robin")


@pytest.mark.parametrize("gap", [0.0, 0.01])
def test_more_servers_than_requests_serve_each_at_once(gap: float):
    """Also those that come while others are served: a server that is busy is not a short queue."""
    ttft = simulate([gap * index for index in range(5)], CURVE, servers=8).ttft_s
    assert ttft == pytest.approx([CURVE(1)] * 5)


def test_service_times_between_the_points():
    assert [CURVE(b) for b in (1, 2, 8, 32)] == [0.10, 0.15, 0.40, 1.30]
    assert CURVE(5) == pytest.approx(0.275)
    assert CURVE(56) == pytest.approx(2.2)
    assert Service([(4, 0.2)])(1) == Service([(4, 0.2)])(9) == 0.2
    assert Service([(4, 0.2), (8, 0.3)])(1) == 0.2


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, -1.0)], [(1, 1.0), (1, 2.0)], [(1, float("inf"))]])
def test_bad_service_times(points):
    with pytest.raises(BadSchedule, match="service times"):
        Service(points)


@pytest.mark.parametrize("arrivals, more", [([], {}), ([2.0, 1.0], {}), ([1.0], {"cap": 0}), ([1.0], {"servers": 0})])
def test_bad_input(arrivals, more):
    with pytest.raises(BadSchedule):
        simulate(arrivals, CURVE, **more)
