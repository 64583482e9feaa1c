"""The share that is asked for is the share that escalates."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Token, Verdict
from policies.combine import AnyOf
from policies.confidence import AvgLogprob, Entropy, MinWindow
from policies.request_rules import Tools
from policies.target_rate import TargetRate, Window
from tests.policies.run import decide, facts, laws, own, tokens

SMALL = facts(tier="small")

STREAMS = {
    "uniform": lambda r: -r.random(),
    "exponential": lambda r: -r.expovariate(3),
    "far and near": lambda r: -0.01 * r.random() if r.random() < 0.7 else -5 - r.random(),
    "one value": lambda r: -0.5,
    "three values": lambda r: r.choice([-0.1, -0.1, -0.2, -3.0]),
    "mostly sure": lambda r: 0.0 if r.random() < 0.95 else -r.random(),
    "heavy tail": lambda r: -1 / (1 - r.random()),
}


def escalations(policy: TargetRate, scores, tier: str = "small") -> list[bool]:
    verdicts = (decide(policy, own([score]), facts(tier=tier))[0].verdict for score in scores)
    return [verdict is Verdict.ESCALATE for verdict in verdicts]


@pytest.mark.parametrize("rate", [0.05, 0.2, 0.7])
@pytest.mark.parametrize("stream", STREAMS)
def test_the_share_converges_for_a_stationary_stream(stream, rate):
    chance = random.Random(f"{stream} {rate}")
    escalated = escalations(TargetRate(rate=rate, window=400), [STREAMS[stream](chance) for _ in range(6000)])
    after = escalated[500:]
    assert sum(after) / len(after) == pytest.approx(rate, abs=0.025)


def test_the_threshold_follows_the_traffic_when_it_changes():
    chance = random.Random(1)
    policy = TargetRate(rate=0.3, window=200)
    escalations(policy, [-chance.random() for _ in range(1000)])
    assert policy.threshold("small") == pytest.approx(-0.7, abs=0.1)
    escalated = escalations(policy, [-10 - chance.random() for _ in range(3000)])
    assert policy.threshold("small") == pytest.approx(-10.7, abs=0.1)
    assert sum(escalated[1000:]) / 2000 == pytest.approx(0.3, abs=0.04)


def test_until_it_has_seen_enough_the_own_threshold_of_the_method_holds():
    policy = TargetRate(of=AvgLogprob(threshold=-2), start=30)
    assert policy.threshold("small") == -2
    assert escalations(policy, [-1.0, -3.0] * 15) == [False, True] * 15
    assert policy.threshold("small") == -3.0  # the quantile of what was seen
    assert escalations(TargetRate(of=AvgLogprob(threshold=-2)), [-2.0] * 5) == [False] * 5


@laws
@given(st.lists(st.floats(-9, 0), max_size=120), st.floats(0.01, 0.99))
def test_the_same_scores_give_the_same_decisions(scores, rate):
    one, other = (escalations(TargetRate(rate=rate, window=20, start=5), scores) for _ in range(2))
    assert one == other


@laws
@given(st.lists(st.floats(-9, 0), min_size=10, max_size=60), st.floats(-9, 0), st.floats(0.05, 0.95))
def test_under_the_threshold_escalates_and_over_it_is_kept(scores, score, rate):
    policy = TargetRate(rate=rate, window=30, start=5)
    escalations(policy, scores)
    threshold = policy.threshold("small")
    assert threshold in scores[-30:]
    escalated = escalations(policy, [score])[0]
    assert score == threshold or escalated == (score < threshold)


@laws
@given(st.lists(st.tuples(st.floats(-9, 0), st.booleans()), max_size=80), st.floats(0.01, 0.99))
def test_a_window_is_the_last_scores_and_nothing_else(added, rate):
    window = Window(20)
    for score, escalated in added:
        window.add(score, escalated)
    last = added[-20:]
    assert len(window) == len(last)
    assert window.escalated_share() == (sum(e for _, e in last) / len(last) if last else 0)
    if last:
        k = min(max(round(rate * (len(last) + 1)), 1), len(last))
        assert window.quantile(rate) == sorted(score for score, _ in last)[k - 1]


def test_each_tier_has_its_own_threshold():
    policy = TargetRate(rate=0.5, window=50, start=10)
    escalations(policy, [-1.0 - i / 100 for i in range(50)])
    escalations(policy, [-8.0 - i / 100 for i in range(50)], tier="middle")
    assert policy.threshold("small") > -2 and policy.threshold("middle") < -7


@laws
@given(tokens)
def test_its_score_is_that_of_the_method_that_it_wraps(answer):
    for of in (AvgLogprob(), Entropy(), MinWindow(window=3)):
        around, alone = TargetRate(of=of).begin(), of.begin()
        around.on_request(SMALL)
        for token in answer:
            assert around.on_token(token).verdict is Verdict.WAIT  # decided on the whole
            alone.on_token(token)
        assert around.score() == alone.score()
        assert TargetRate(of=of).top_logprobs == of.top_logprobs


@pytest.mark.parametrize(("answer", "word"), [([], "empty_answer"), ([Token(None)], "no_logprobs")])
def test_an_unmeasured_answer_escalates_and_counts_as_the_least_confident(answer, word):
    policy = TargetRate(rate=0.5, window=20, start=20)
    for _ in range(20):
        assert decide(policy, answer, SMALL)[0] == Decision.escalate(word)
    assert policy.threshold("small") == -math.inf
    assert decide(policy, own([-9.0]), SMALL)[0] == Decision.keep("confident")


def test_a_request_that_never_finished_is_not_remembered():
    policy = TargetRate()
    judge = policy.begin()
    judge.on_request(SMALL)
    judge.on_token(Token(-1.0))
    assert len(policy.seen("small")) == 0
    decide(AnyOf(of=[Tools(), policy]), own([-1.0]), SMALL._replace(has_tools=True))
    assert len(policy.seen("small")) == 0


def test_two_policies_share_no_memory():
    one, other = TargetRate(), TargetRate()
    escalations(one, [-1.0] * 5)
    assert (len(one.seen("small")), len(other.seen("small"))) == (5, 0)
