"""Rules on tiers, load and budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, TierState, Verdict
from policies.combine import AllOf
from policies.confidence import AvgLogprob
from policies.tier_rules import Budget, TierBusy, TierReady
from tests.policies.run import decide, facts, laws, own, verdict

numbers = st.integers(0, 100)


def house(small: int = 0, middle: int = 0, large: int = 0, down: str = "", queued: int | None = None):
    loads = {"small": small, "middle": middle, "large": large}
    return facts(tier="small", tiers=tuple(TierState(name, name != down, n, queued) for name, n in loads.items()))


@laws
@given(numbers, st.integers(1, 100))
def test_a_busy_tier_is_left_exactly_from_its_limit_on(load, limit):
    expected = Decision.escalate("tier_busy", "large") if load >= limit else Decision.keep("no_match")
    assert decide(TierBusy(in_flight=limit, to="large"), facts=house(small=load, large=1000))[0] == expected


def test_a_busy_tier_may_be_another_and_its_queue_counts():
    assert verdict(TierBusy(tier="middle", in_flight=2), facts=house(middle=2)) is Verdict.ESCALATE
    assert verdict(TierBusy(queued=3), facts=house(queued=3)) is Verdict.ESCALATE
    assert verdict(TierBusy(queued=3), facts=house(queued=2)) is Verdict.KEEP


@pytest.mark.parametrize(
    ("rule", "state", "word"),
    [
        (TierReady(), house(), "permitted"),
        (TierReady(), house(down="large"), "permitted"),  # the next tier is the middle one
        (TierReady(), house(down="middle"), "target_down"),
        (TierReady(tier="large"), house(down="large"), "target_down"),
        (TierReady(in_flight=5), house(small=9, middle=4, large=9), "permitted"),
        (TierReady(in_flight=5), house(middle=5), "target_busy"),
        (TierReady(queued=2), house(queued=1), "permitted"),
        (TierReady(queued=2), house(queued=2), "target_busy"),
        (Budget(), facts(escalated_share=0.49), "permitted"),
        (Budget(), facts(escalated_share=0.5), "share_spent"),
        (Budget(calls=2), facts(escalated_share=0, calls_used=1), "permitted"),
        (Budget(calls=2), facts(escalated_share=0, calls_used=2), "calls_spent"),
        (Budget(calls=2, share=None), facts(calls_used=1), "permitted"),
    ],
)
def test_a_permission_escalates_while_nothing_forbids_it(rule, state, word):
    decision = rule.begin().on_request(state)
    assert decision.reason == word
    assert (decision.verdict is Verdict.ESCALATE) == (word == "permitted")


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        (TierBusy(), facts()),
        (TierBusy(queued=1), house()),
        (TierBusy(tier="huge"), house()),
        (TierReady(), facts()),
        (TierReady(), house()._replace(tier="large")),  # there is no next one
        (TierReady(tier="huge"), house()),
        (TierReady(queued=1), house()),
        (Budget(), facts(calls_used=0)),
        (Budget(calls=2), facts(escalated_share=0.0)),
    ],
)
def test_a_state_that_is_not_told_keeps_and_says_so(rule, state):
    assert decide(rule, facts=state)[0] == Decision.keep("no_signal")


def test_a_permission_in_an_all_stops_an_escalation_before_the_attempt():
    policy = AllOf(of=[AvgLogprob(threshold=-0.1), TierReady()])
    unsure = own([-3.0])
    assert decide(policy, unsure, house()) == (Decision.escalate("low_confidence"), 1)
    assert decide(policy, unsure, house(down="middle")) == (Decision.keep("target_down"), 0)
