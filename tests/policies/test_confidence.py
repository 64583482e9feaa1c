"""Laws of the confidence policies."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from policies import Decision, Token, Verdict
from policies.confidence import AvgLogprob, Entropy, Hybrid, Margin, MinWindow
from policies.fixed import Always, Never
from tests.policies.run import decide, facts, laws, own, tokens, verdict

logprobs = st.lists(st.floats(-20, 0), min_size=1, max_size=40)
thresholds = st.floats(-20, 0)
shares = st.floats(0, 1)
METHODS = [AvgLogprob, MinWindow, Margin, Entropy, Hybrid]

confident = st.one_of(
    st.builds(AvgLogprob, threshold=thresholds),
    st.builds(Margin, threshold=st.floats(0, 20)),
    st.builds(Entropy, threshold=shares, alternatives=st.integers(2, 6)),
    st.builds(MinWindow, threshold=thresholds, window=st.integers(1, 8)),
    st.builds(
        Hybrid,
        threshold=shares,
        window=st.integers(1, 8),
        weights=st.dictionaries(
            st.sampled_from(["avg_logprob", "margin", "entropy", "min_window"]), st.floats(0.1, 9), min_size=1
        ),
    ),
)


@laws
@given(tokens, confident, shares)
def test_what_escalates_at_a_threshold_escalates_at_every_higher_one(answer, policy, share):
    lowest = 0.0 if policy.threshold > 0 else -20.0
    lower = policy.model_copy(update={"threshold": lowest + (policy.threshold - lowest) * share})
    if verdict(lower, tokens=answer) is Verdict.ESCALATE:
        assert verdict(policy, tokens=answer) is Verdict.ESCALATE


@laws
@given(tokens, confident, st.integers(0, 30))
def test_an_early_escalation_never_contradicts_the_decision_on_the_whole(answer, policy, room):
    whole = decide(policy, answer)[0]
    limited, read = decide(policy, answer, facts(answer_limit=len(answer) + room))
    assert limited == whole
    assert read == len(answer) or limited.verdict is Verdict.ESCALATE


@pytest.mark.parametrize(
    "policy", [AvgLogprob(threshold=-1), Hybrid(threshold=math.exp(-1), weights={"avg_logprob": 1})]
)
def test_an_answer_that_can_just_reach_the_threshold_is_waited_for(policy):
    assert decide(policy, own([-4, 0, 0, 0]), facts(answer_limit=4))[0] == Decision.keep("confident")
    assert decide(policy, own([-4.1, 0, 0, 0]), facts(answer_limit=4)) == (Decision.escalate("low_confidence"), 1)


@laws
@given(logprobs, st.integers(1, 8))
def test_the_score_of_a_window_is_the_worst_so_far(values, window):
    judge = MinWindow(window=window).begin()
    for token in own(values):
        judge.on_token(token)
    width = min(window, len(values))
    assert judge.score() == min(sum(values[i : i + width]) / width for i in range(len(values) - width + 1))


@pytest.mark.parametrize("method", [AvgLogprob, MinWindow])
def test_a_log_probability_that_was_rounded_above_0_is_0(method):
    judge = method().begin()
    judge.on_token(Token(0.5))
    assert judge.score() == 0


@pytest.mark.parametrize("policy", [AvgLogprob(threshold=-1), Entropy(threshold=0.9), Hybrid(threshold=0.9)])
def test_an_answer_that_can_no_longer_reach_the_threshold_escalates_early(policy):
    unsure = [Token(-5.0, (-1.7, -1.7, -1.7, -1.7, -1.7))] * 40
    decision, read = decide(policy, unsure, facts(answer_limit=60))
    assert decision == Decision.escalate("low_confidence") and read < 40
    assert decide(policy, unsure)[1] == (8 if isinstance(policy, Hybrid) else 40)


@laws
@given(logprobs, thresholds)
def test_avg_logprob_compares_the_mean_of_the_whole_answer(values, threshold):
    decision, read = decide(AvgLogprob(threshold=threshold), own(values))
    mean = sum(values) / len(values)
    assert read == len(values)
    assert decision.verdict is (Verdict.ESCALATE if mean < threshold else Verdict.KEEP)


@laws
@given(logprobs, thresholds, st.integers(1, 8))
def test_min_window_equals_the_worst_window(values, threshold, window):
    decision, _ = decide(MinWindow(threshold=threshold, window=window), own(values))
    width = min(window, len(values))
    worst = min(sum(values[i : i + width]) / width for i in range(len(values) - width + 1))
    assert decision.verdict is (Verdict.ESCALATE if worst < threshold else Verdict.KEEP)


def test_min_window_escalates_while_the_answer_still_runs():
    decision, read = decide(MinWindow(threshold=-1, window=2), own([-0.1, -0.1, -5, -5, -0.1, -0.1]))
    assert (decision, read) == (Decision.escalate("low_confidence"), 3)


@pytest.mark.parametrize(("gap", "verdict"), [(0.1, Verdict.ESCALATE), (3.0, Verdict.KEEP)])
def test_margin_reads_the_gap_between_the_two_likeliest_tokens(gap, verdict):
    token = Token(-0.5, (-0.5 - gap, -0.5, -9.0))
    assert decide(Margin(threshold=1.0), [token, token])[0].verdict is verdict


@laws
@given(st.lists(st.floats(-20, 0), min_size=2, max_size=10), st.integers(2, 10))
def test_entropy_is_that_of_the_likeliest_renormalised(top, alternatives):
    judge = Entropy(alternatives=alternatives).begin()
    judge.on_token(Token(top[0], tuple(top)))
    weights = [math.exp(value) for value in sorted(top)[-alternatives:]]
    shares = [weight / sum(weights) for weight in weights]
    entropy = -sum(p * math.log(p) for p in shares if p > 0)
    assert judge.score() == pytest.approx(1 - entropy / math.log(alternatives), abs=1e-6)


def test_entropy_is_0_where_all_are_equal_and_1_where_one_is_certain():
    for top, score in (((-1.6,) * 5, 0.0), ((0.0, -math.inf, -math.inf, -math.inf, -math.inf), 1.0)):
        judge = Entropy(alternatives=5).begin()
        judge.on_token(Token(-1.0, top))
        assert judge.score() == pytest.approx(score, abs=1e-12)


@laws
@given(tokens, st.floats(0.01, 0.99))
def test_a_hybrid_of_one_method_is_that_method_on_another_scale(answer, threshold):
    for name, policy in (
        ("avg_logprob", AvgLogprob(threshold=math.log(threshold))),
        ("min_window", MinWindow(threshold=math.log(threshold))),
        ("margin", Margin(threshold=2 * math.atanh(threshold))),
        ("entropy", Entropy(threshold=threshold)),
    ):
        hybrid, alone = Hybrid(threshold=threshold, weights={name: 3.0}).begin(), policy.begin()
        for token in answer:
            hybrid.on_token(token)
            alone.on_token(token)
        assume(abs(hybrid.score() - threshold) > 1e-9)
        assert (hybrid.score() < threshold) == (alone.score() < policy.threshold)


@laws
@given(tokens)
def test_a_hybrid_lies_between_its_parts(answer):
    def scored(**weights):
        judge = Hybrid(weights=weights).begin()
        for token in answer:
            judge.on_token(token)
        return judge.score()

    alone = scored(avg_logprob=1), scored(min_window=1)
    assert min(alone) - 1e-9 <= scored(avg_logprob=2, min_window=5) <= max(alone) + 1e-9
    assert scored(avg_logprob=2, min_window=5) == pytest.approx((2 * alone[0] + 5 * alone[1]) / 7)


@pytest.mark.parametrize("method", METHODS)
def test_an_empty_answer_escalates_and_says_so(method):
    assert decide(method(), [])[0] == Decision.escalate("empty_answer")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("missing", [Token(None), Token(math.nan)])
def test_an_unmeasured_token_escalates_and_says_so(method, missing):
    assert decide(method(), [Token(-0.1, (-0.1, -5.0)), missing])[0] == Decision.escalate("no_logprobs")


@pytest.mark.parametrize("method", [AvgLogprob, MinWindow])
def test_an_impossible_token_is_the_least_confident_of_all(method):
    assert decide(method(), own([-math.inf]))[0] == Decision.escalate("low_confidence")


def test_a_judge_measures_nothing_before_the_first_token():
    assert AvgLogprob().begin().score() is None


def test_always_waits_for_the_first_token_so_that_there_is_kv_to_lift():
    assert decide(Always(), own([-0.1, -0.1])) == (Decision.escalate("always"), 1)
    assert decide(Always(), [])[0] == Decision.escalate("always")


def test_never_keeps_before_the_first_token():
    assert decide(Never(), own([-9.0])) == (Decision.keep("never"), 0)


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (AvgLogprob(), 0),
        (MinWindow(), 0),
        (Margin(), 2),
        (Entropy(alternatives=7), 7),
        (Hybrid(weights={"avg_logprob": 1}), 0),
        (Hybrid(), 2),
        (Hybrid(weights={"entropy": 1, "margin": 1}, alternatives=3), 3),
        (Always(), None),
        (Never(), None),
    ],
)
def test_a_policy_asks_only_for_the_log_probabilities_that_it_reads(policy, asked):
    assert policy.top_logprobs == asked
