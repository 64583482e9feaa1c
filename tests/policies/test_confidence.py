"""Laws of the confidence policies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from policies import AnyPolicy, Decision, Finish, Policy, RequestFacts, Token, Verdict
from policies.confidence import AvgLogprob, Margin, MinWindow
from policies.fixed import Always, Never

logprobs = st.lists(st.floats(-20, 0), min_size=1, max_size=40)
thresholds = st.floats(-20, 0)
FACTS = RequestFacts(characters=10, messages=1, has_tools=False, wants_json=False)


def decide(policy: Policy, tokens: list[Token]) -> tuple[Decision, int]:
    """The decision, and how many tokens were needed for it."""
    judge = policy.begin()
    decision = judge.on_request(FACTS)
    for count, token in enumerate(tokens):
        if decision.verdict is not Verdict.WAIT:
            return decision, count
        decision = judge.on_token(token)
    return (judge.on_finish(Finish("stop")) if decision.verdict is Verdict.WAIT else decision), len(tokens)


def own(values: list[float]) -> list[Token]:
    return [Token(value) for value in values]


@given(logprobs, thresholds, thresholds)
@pytest.mark.parametrize("method", [AvgLogprob, MinWindow])
def test_what_escalates_at_a_threshold_escalates_at_every_higher_one(method, values, one, other):
    low, high = sorted((one, other))
    if decide(method(threshold=low), own(values))[0].verdict is Verdict.ESCALATE:
        assert decide(method(threshold=high), own(values))[0].verdict is Verdict.ESCALATE


@given(logprobs, thresholds)
def test_avg_logprob_compares_the_mean_of_the_whole_answer(values, threshold):
    decision, read = decide(AvgLogprob(threshold=threshold), own(values))
    mean = sum(values) / len(values)
    assert read == len(values)
    assert decision.verdict is (Verdict.ESCALATE if mean < threshold else Verdict.KEEP)


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


@pytest.mark.parametrize("method", [AvgLogprob, MinWindow, Margin])
def test_an_empty_answer_escalates_and_says_so(method):
    assert decide(method(), [])[0] == Decision.escalate("empty_answer")


@pytest.mark.parametrize("method", [AvgLogprob, MinWindow, Margin])
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
    ("policy", "asked"), [(AvgLogprob(), 0), (MinWindow(), 0), (Margin(), 2), (Always(), None), (Never(), None)]
)
def test_a_policy_asks_only_for_the_log_probabilities_that_it_reads(policy, asked):
    assert policy.top_logprobs == asked


def test_every_method_has_a_documented_default():
    for method in ("avg_logprob", "margin", "min_window", "always", "never"):
        policy = TypeAdapter(AnyPolicy).validate_python({"method": method})
        assert policy.method == method


@pytest.mark.parametrize(
    "wrong", [{"method": "guess"}, {"method": "avg_logprob", "threshold": 0.5}, {"method": "never", "x": 1}, {}]
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        TypeAdapter(AnyPolicy).validate_python(wrong)
