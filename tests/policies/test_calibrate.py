"""Laws of the fitted threshold and of the curve."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies import Verdict
from policies.calibrate import Goal, area, calibrate, curve
from policies.confidence import AvgLogprob
from policies.outcomes import Outcome, OutcomesError
from tests.policies.run import laws, own, verdict

right = st.sampled_from([0.0, 1.0])
scores = st.one_of(st.floats(-20, 0), st.sampled_from([-1.0, -0.5, -0.25]))
outcomes = st.lists(st.builds(Outcome, scores, right, right), min_size=4, max_size=60)
costs = st.floats(0.01, 2)


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def usable(found):
    small, large = mean(o.small_right for o in found), mean(o.large_right for o in found)
    return 0 < small < large and len({o.score for o in found}) > 1


@st.composite
def usable_outcomes(draw):
    """Sets that allow a calibration: one request that only the large model solves, one that both do, and others."""
    drawn = draw(outcomes)
    found = [*drawn, Outcome(draw(scores), 0.0, 1.0), Outcome(draw(scores), 1.0, 1.0)]
    assume(usable(found))
    return found


def served(found, threshold):
    """Rate and quality when the policy runs at that threshold: the real one where it takes it."""
    escalated = [outcome.score < threshold for outcome in found]
    if threshold <= 0:
        policy = AvgLogprob(threshold=threshold)
        assert escalated == [verdict(policy, tokens=own([o.score])) is Verdict.ESCALATE for o in found]
    quality = mean(o.large_right if up else o.small_right for o, up in zip(found, escalated, strict=True))
    return mean(escalated), quality


@laws
@given(usable_outcomes(), costs)
def test_each_point_is_what_the_policy_does_at_its_threshold(found, cost):
    points = curve(found, cost, "sure")
    for point in points:
        assert (point.rate, point.quality) == pytest.approx(served(found, point.threshold))
        assert point.cost == pytest.approx(cost + point.rate)
    assert (points[0].rate, points[-1].rate) == (0, 1)
    assert all(a.rate < b.rate and a.threshold < b.threshold for a, b in pairwise(points))
    assert len(points) == len({o.score for o in found}) + 1


@laws
@given(usable_outcomes(), st.floats(0, 1))
def test_the_threshold_gives_the_rate_asked_for_as_nearly_as_ties_allow(found, rate):
    chosen = calibrate(found, Goal(rate=rate), 0.1, "sure").chosen
    got, _ = served(found, chosen.threshold)
    assert got == pytest.approx(chosen.rate)
    most_tied = max(sum(o.score == other.score for o in found) for other in found)
    assert abs(got - rate) <= most_tied / len(found) / 2 + 1e-9


@laws
@given(usable_outcomes(), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_rate_never_has_a_lower_threshold(found, one, other):
    low, high = sorted((one, other))
    thresholds = [calibrate(found, Goal(rate=rate), 0.1, "sure").chosen.threshold for rate in (low, high)]
    assert thresholds[0] <= thresholds[1]


@laws
@given(usable_outcomes(), st.floats(0, 1))
def test_a_quality_is_reached_at_the_lowest_rate_or_refused(found, quality):
    points = curve(found, 0.1, "sure")
    reached = [point.rate for point in points if point.quality >= quality - 1e-12]
    if not reached:
        with pytest.raises(OutcomesError, match="out of reach"):
            calibrate(found, Goal(quality=quality), 0.1, "sure")
        return
    chosen = calibrate(found, Goal(quality=quality), 0.1, "sure").chosen
    assert served(found, chosen.threshold)[1] >= quality - 1e-9
    assert chosen.rate == min(reached)


@laws
@given(usable_outcomes(), costs)
def test_without_a_goal_it_is_the_best_that_costs_no_more_than_large_alone(found, cost):
    result = calibrate(found, Goal(), cost, "sure")
    assert result.chosen.rate <= max(0, 1 - cost) + 1e-9
    affordable = [point for point in result.curve if point.cost <= 1]
    assert all(result.chosen.quality >= point.quality for point in affordable)


@laws
@given(usable_outcomes(), costs)
def test_below_break_even_the_cascade_is_cheaper_and_above_it_dearer(found, cost):
    result = calibrate(found, Goal(), cost, "sure")
    for point in result.curve:
        if abs(point.rate - result.break_even_rate) > 1e-9:
            assert (point.cost > 1) == (point.rate > result.break_even_rate)


@laws
@given(usable_outcomes())
def test_no_score_beats_the_one_that_knows_the_gain(found):
    result = calibrate(found, Goal(), 0.1, "sure")
    assert result.area <= result.best_area + 1e-9
    knowing = [replace(o, score=o.small_right - o.large_right) for o in found]
    assert area(curve(knowing, 0.1, "sure")) == result.best_area
    assert result.best_area >= 0.5 - 1e-9


@laws
@given(usable_outcomes())
def test_the_area_of_a_score_turned_round_is_its_complement(found):
    """Escalating in the opposite order gives the curve turned by half a turn."""
    turned = [replace(o, score=-o.score) for o in found]
    assert area(curve(found, 0.1, "sure")) + area(curve(turned, 0.1, "sure")) == pytest.approx(1)


@laws
@given(usable_outcomes())
def test_a_score_that_knows_nothing_has_the_area_of_mixing_by_lot(found):
    twice = [replace(o, score=score) for o in found for score in (-1.0, -2.0)]
    assert area(curve(twice, 0.1, "sure")) == pytest.approx(0.5)


def test_areas_by_hand():
    hard, easy = Outcome(-2.0, 0.0, 1.0), Outcome(-1.0, 1.0, 1.0)
    result = calibrate([hard, easy], Goal(), 0.1, "sure")
    # quality rises from 0.5 to 1 over the first half and stays: (0.375 + 0.5 - 0.5) / 0.5
    assert (result.area, result.best_area) == (pytest.approx(0.75), pytest.approx(0.75))
    assert calibrate([replace(hard, score=0.0), easy], Goal(), 0.1, "sure").area == pytest.approx(0.25)


@laws
@given(usable_outcomes(), st.floats(0, 1), st.randoms())
def test_the_order_of_the_outcomes_changes_nothing(found, rate, chance):
    shuffled = list(found)
    chance.shuffle(shuffled)
    one, other = (calibrate(order, Goal(rate=rate), 0.1, "sure") for order in (found, shuffled))
    assert one.chosen == other.chosen and one.area == pytest.approx(other.area)


@laws
@given(usable_outcomes(), st.floats(0, 1))
def test_a_score_of_hardness_is_the_same_score_turned_round(found, rate):
    turned = [replace(o, score=-o.score) for o in found]
    sure, hard = calibrate(found, Goal(rate=rate), 0.1, "sure"), calibrate(turned, Goal(rate=rate), 0.1, "hard")
    assert [replace(p, threshold=-p.threshold) for p in hard.curve] == list(sure.curve)
    assert sum(o.score > hard.chosen.threshold for o in turned) / len(turned) == pytest.approx(hard.chosen.rate)


GOOD = [Outcome(-2.0, 0.0, 1.0), Outcome(-1.0, 1.0, 1.0)]


def test_of_two_that_are_as_good_the_lower_rate_is_chosen():
    assert calibrate(GOOD, Goal(rate=0.25), 0.1, "sure").chosen.rate == 0
    assert calibrate(GOOD, Goal(rate=0.75), 0.1, "sure").chosen.rate == 0.5
    easier = [*GOOD, Outcome(-0.5, 1.0, 1.0)]
    assert calibrate(easier, Goal(), 0.1, "sure").chosen.rate == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("found", "goal", "cost", "said"),
    [
        ([], Goal(), 0.1, "no outcomes"),
        ([Outcome(-1.0, 1.0, 1.0), Outcome(-2.0, 1.0, 0.0)], Goal(), 0.1, "one class only: the small model is right"),
        ([Outcome(-1.0, 0.0, 1.0), Outcome(-2.0, 0.0, 0.0)], Goal(), 0.1, "one class only: the small model is wrong"),
        ([Outcome(-1.0, 1.0, 0.0), Outcome(-2.0, 0.0, 0.0)], Goal(), 0.1, "the right way round"),
        ([Outcome(-1.0, 1.0, 0.0), Outcome(-2.0, 0.0, 1.0)], Goal(), 0.1, "escalating gains nothing"),
        ([replace(o, score=-1.0) for o in GOOD], Goal(), 0.1, "all 2 outcomes have the score -1"),
        (GOOD, Goal(rate=0.1, quality=0.1), 0.1, "give one of them"),
        (GOOD, Goal(rate=1.1), 0.1, "rate is 1.1; expected a share"),
        (GOOD, Goal(quality=float("nan")), 0.1, "quality is nan"),
        (GOOD, Goal(), 0.0, "cost ratio is 0"),
    ],
)
def test_what_cannot_be_fitted_is_said(found, goal, cost, said):
    with pytest.raises(OutcomesError, match=said):
        calibrate(found, goal, cost, "sure")
