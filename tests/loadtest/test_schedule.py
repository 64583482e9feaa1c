"""Laws of the schedules: one seed one trace, rates share their randomness, rates and spreads are as asked."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from pydantic import ValidationError

from loadtest import schedule
from loadtest.errors import BadSchedule
from loadtest.schedule import Arrival, Schedule

MANY = 20_000


def gaps(arrivals: list[Arrival]) -> list[float]:
    return [b.offset_s - a.offset_s for a, b in pairwise([Arrival(-1, 0.0), *arrivals])]


@pytest.mark.parametrize("draw", [schedule.poisson, lambda *a: schedule.gamma(*a, cv=3.0)])
def test_a_seed_is_a_trace(draw):
    assert draw(5.0, 100, 7) == draw(5.0, 100, 7)
    assert draw(5.0, 100, 7) != draw(5.0, 100, 8)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_rates_share_the_unit_rate_draw(cv):
    slow, fast = (schedule.gamma(rate, 200, 3, cv) for rate in (2.0, 17.0))
    assert [a.offset_s * 2.0 for a in slow] == pytest.approx([a.offset_s * 17.0 for a in fast], rel=1e-12)


def test_a_longer_trace_begins_like_a_shorter_one():
    assert schedule.poisson(3.0, 500, 1)[:100] == schedule.poisson(3.0, 100, 1)


@pytest.mark.parametrize("cv", [0.3, 1.0, 3.0])
def test_mean_and_spread_are_as_asked_within_sampling_error(cv):
    found = gaps(schedule.gamma(50.0, MANY, 11, cv))
    error = cv / math.sqrt(MANY)  # standard error of the mean of unit gaps
    assert abs(fmean(found) * 50.0 - 1) < 4 * error
    # The variance of a sample's variance: kurtosis of a gamma is 3 + 6 cv^2.
    spread_error = cv * math.sqrt((2 + 6 * cv**2) / MANY) / 2
    assert abs(pstdev(found) * 50.0 - cv) < 4 * spread_error + 4 * error


def test_poisson_gaps_are_exponential():
    found = gaps(schedule.poisson(1.0, MANY, 2))
    for x in (0.1, 0.5, 1.0, 2.0):
        share = math.exp(-x)
        assert abs(fmean(gap > x for gap in found) - share) < 4 * math.sqrt(share * (1 - share) / MANY)


def test_poisson_is_gamma_with_a_spread_of_one():
    assert schedule.poisson(4.0, 50, 9) == schedule.gamma(4.0, 50, 9, cv=1.0)


def test_constant_and_at_once():
    assert gaps(schedule.constant(4.0, 10)) == [0.25] * 10
    assert [a.offset_s for a in schedule.at_once(5)] == [0.0] * 5


@pytest.mark.parametrize("arrivals", [schedule.poisson(9.0, 101, 0), schedule.constant(1.0, 101)])
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_the_shares_of_all_workers_are_the_schedule(arrivals, workers):
    shares = [schedule.share(arrivals, worker, workers) for worker in range(workers)]
    assert sorted((a for one in shares for a in one), key=lambda a: a.index) == arrivals
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("scale", [0.5, 1.0, 4.0])
def test_a_replay_is_the_trace_at_another_speed(scale):
    trace = [Arrival(0, 0.0, 10, 1), Arrival(1, 2.0, 20, 2), Arrival(2, 3.0, 30, 3)]
    replayed = schedule.replay(trace, scale)
    assert [a.offset_s * scale for a in replayed] == pytest.approx([0.0, 2.0, 3.0])
    assert [(a.index, a.context_tokens, a.output_tokens) for a in replayed] == [(0, 10, 1), (1, 20, 2), (2, 30, 3)]
    assert schedule.replay(trace, scale, 2) == replayed[:2]


@pytest.mark.parametrize(
    ("draw", "word"),
    [
        (lambda: schedule.poisson(0.0, 1, 0), "rate of 0"),
        (lambda: schedule.poisson(-2.0, 1, 0), "rate of -2"),
        (lambda: schedule.poisson(math.nan, 1, 0), "rate of nan"),
        (lambda: schedule.poisson(math.inf, 1, 0), "rate of inf"),
        (lambda: schedule.constant(1.0, 0), "0 arrivals"),
        (lambda: schedule.gamma(1.0, 5, 0, cv=0.0), "variation of 0"),
        (lambda: schedule.replay([Arrival(0, 0.0)], 0.0), "scale of 0"),
        (lambda: schedule.replay([Arrival(0, 0.0)], 1.0, 2), "2 arrivals of a trace that holds 1"),
        (lambda: Schedule(kind="poisson").arrivals(0), "no count"),
        (lambda: Schedule(kind="trace").arrivals(0), "no file"),
    ],
)
def test_what_cannot_be_drawn_is_refused_with_its_value(draw, word):
    with pytest.raises(BadSchedule, match=word):
        draw()


def test_a_schedule_by_name_is_the_schedule(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("0,10,1\n4,20,2\n8,30,3\n")
    assert Schedule(rate=3.0, count=9).arrivals(5) == schedule.poisson(3.0, 9, 5)
    assert Schedule(kind="gamma", rate=3.0, count=9, cv=4.0).arrivals(5) == schedule.gamma(3.0, 9, 5, 4.0)
    assert Schedule(kind="constant", rate=3.0, count=9).arrivals(5) == schedule.constant(3.0, 9)
    replayed = Schedule(kind="trace", trace=file, scale=2.0, count=2).arrivals(5)
    assert replayed == [Arrival(0, 0.0, 10, 1), Arrival(1, 2.0, 20, 2)]


def test_a_misspelt_setting_is_refused():
    with pytest.raises(ValidationError, match="ratee"):
        Schedule(ratee=3.0)
