"""A seeded share of the kept requests is marked, and nothing else changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Finish, SelfCheck, Token, Verdict
from policies.confidence import AvgLogprob, MinWindow
from policies.fixed import Always, Never
from policies.shadow import Shadow
from policies.verify import SelfVerify
from tests.policies.run import decide, laws, own, tokens


def marks(policy: Shadow, count: int) -> list[bool]:
    return [decide(policy)[0].shadow for _ in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_the_share_of_the_kept_requests_is_marked(share):
    assert sum(marks(Shadow(of=Never(), share=share), 4000)) / 4000 == pytest.approx(share, abs=0.02)


def test_the_seed_alone_decides_which():
    one, same, other = (Shadow(of=Never(), share=0.5, seed=seed) for seed in (1, 1, 2))
    drawn = marks(one, 100)
    assert drawn == marks(same, 100) != marks(other, 100)


def test_what_escalates_is_never_marked_and_draws_nothing():
    policy = Shadow(of=MinWindow(threshold=-1, window=1), share=0.5)
    drawn = []
    for _ in range(100):
        assert decide(policy, [Token(-9.0)])[0] == Decision.escalate("low_confidence")
        drawn.append(decide(policy, [Token(-0.1)])[0].shadow)
    assert drawn == marks(Shadow(of=Never(), share=0.5), 100)
    assert decide(Shadow(of=Always(), share=1))[0] == Decision.escalate("always")


@laws
@given(tokens, st.floats(-20, 0))
def test_the_decision_and_its_moment_are_those_of_the_policy_inside(answer, threshold):
    for inside in (AvgLogprob(threshold=threshold), MinWindow(threshold=threshold), Never()):
        (marked, read), (alone, alone_read) = decide(Shadow(of=inside, share=1), answer), decide(inside, answer)
        assert (marked._replace(shadow=False), read) == (alone, alone_read)
        assert marked.shadow is (alone.verdict is Verdict.KEEP)


def test_the_score_and_the_question_pass_through():
    judge = Shadow(of=AvgLogprob()).begin()
    judge.on_token(own([-0.5])[0])
    assert judge.score() == -0.5
    sure = decide(Shadow(of=SelfVerify(), share=1), finish=Finish("stop", "42"), check=SelfCheck((("yes", 0.0),)))[0]
    assert (sure.reason, sure.shadow) == ("verified", True)
