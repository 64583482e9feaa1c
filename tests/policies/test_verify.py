"""The small model's verdict on its own answer."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Finish, SelfCheck, ToolCall, Verdict
from policies.verify import SelfVerify
from tests.policies.run import STOP, decide, laws

SAID = Finish("stop", text="42")
weights = st.floats(1e-6, 1)


def check(**probabilities: float) -> SelfCheck:
    return SelfCheck(tuple((text, math.log(p)) for text, p in probabilities.items()))


@laws
@given(weights, weights, weights, st.floats(0, 1))
def test_the_score_is_yes_against_no_whatever_else_there_is(yes, no, other, threshold):
    judge = SelfVerify(threshold=threshold).begin()
    assert judge.on_finish(SAID).verdict is Verdict.WAIT
    decision = judge.on_check(check(yes=yes, no=no, perhaps=other))
    assert judge.score() == pytest.approx(yes / (yes + no))
    assert (decision.verdict is Verdict.ESCALATE) == (judge.score() < threshold)


@laws
@given(st.permutations([(" Yes", -1.0), ("YES", -2.0), ("no", -1.5), ("nope", -0.5)]))
def test_spaces_case_and_order_of_the_alternatives_do_not_count(top):
    judge = SelfVerify().begin()
    judge.on_check(SelfCheck(tuple(top)))
    yes = math.exp(-1) + math.exp(-2)
    assert judge.score() == pytest.approx(yes / (yes + math.exp(-1.5)))


def test_other_words_may_be_named():
    policy = SelfVerify(yes_words=("Ja", " да "), no_words=("nein",))
    assert decide(policy, finish=SAID, check=check(ja=0.3, да=0.3, nein=0.3))[0] == Decision.keep("verified")
    assert decide(policy, finish=SAID, check=check(ja=0.1, nein=0.3))[0] == Decision.escalate("self_doubt")


@pytest.mark.parametrize("silent", [SelfCheck(), check(perhaps=1.0), SelfCheck((("yes", math.nan),))])
def test_no_verdict_escalates_and_says_so(silent):
    assert decide(SelfVerify(threshold=0), finish=SAID, check=silent)[0] == Decision.escalate("no_verdict")


def test_an_empty_answer_is_not_put_before_the_model():
    assert SelfVerify().begin().on_finish(Finish("stop", text=" \n")) == Decision.escalate("empty_answer")
    calls = (ToolCall("f", "{}"),)
    assert SelfVerify().begin().on_finish(Finish("tool_calls", text="", tool_calls=calls)).verdict is Verdict.WAIT
    assert SelfVerify().begin().on_finish(STOP).verdict is Verdict.WAIT
