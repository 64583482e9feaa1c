"""Where a queue begins to grow: the judgement on the simulator, whose saturation is known."""

from __future__ import annotations

import pytest

from loadtest.bracket import TRIAL, bracket, queue_grows
from loadtest.errors import LoadTestError
from loadtest.schedule import constant
from loadtest.simulate import CAP, Service, simulate

CURVES = {
    "like native prefill": Service([(1, 0.3), (32, 9.0)]),
    "like a lift": Service([(1, 0.2), (8, 0.9), (32, 3.2)]),
    "like a GPU": Service([(1, 0.05), (4, 0.1), (32, 0.75)]),
}


def grows_on(curve: Service, rate: float) -> bool:
    arrivals = [arrival.offset_s for arrival in constant(rate, TRIAL)]
    ttft = simulate(arrivals, curve).ttft_s
    return queue_grows(arrivals, [start + seconds for start, seconds in zip(arrivals, ttft)])


@pytest.mark.parametrize("name", CURVES)
def test_the_bracket_is_where_the_simulated_server_saturates(name: str):
    mu = CAP / CURVES[name](CAP)
    for guess in (0.3 * mu, mu, 3 * mu):
        stable, unstable = bracket(lambda rate: grows_on(CURVES[name], rate), guess)
        assert stable < unstable <= stable / 0.9 + 1e-9
        assert 0.85 * mu < stable and unstable < 1.15 * mu


@pytest.mark.parametrize("name", CURVES)
def test_far_from_saturation_the_judgement_is_sure(name: str):
    mu = CAP / CURVES[name](CAP)
    assert not any(grows_on(CURVES[name], share * mu) for share in (0.05, 0.2, 0.5, 0.7, 0.8))
    assert all(grows_on(CURVES[name], share * mu) for share in (1.15, 1.3, 2, 5))


def test_the_order_of_the_answers_does_not_matter():
    arrivals = [arrival.offset_s for arrival in constant(2.0, 40)]
    answered = [start + 5 for start in arrivals]
    assert queue_grows(arrivals, answered) == queue_grows(arrivals, answered[::-1])


def test_each_trial_halves_what_is_left():
    tried: list[float] = []

    def grows(rate: float) -> bool:
        tried.append(rate)
        return rate > 7.3

    stable, unstable = bracket(grows, 6.0, width=0.02)
    assert stable <= 7.3 < unstable and unstable - stable <= 0.02 * unstable
    assert stable in tried and unstable in tried


@pytest.mark.parametrize("grows", [True, False])
def test_no_bracket_is_told(grows: bool):
    with pytest.raises(LoadTestError, match="no rate found"):
        bracket(lambda _: grows, 1.0)
