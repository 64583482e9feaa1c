"""Runs a policy as the router does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

from policies import Decision, Finish, Policy, RequestFacts, SelfCheck, Token, Verdict

FACTS = RequestFacts(characters=10, messages=1, has_tools=False, wants_json=False)
STOP = Finish("stop")
NO_CHECK = SelfCheck()

laws = settings(max_examples=100, deadline=None, derandomize=True, database=None)


def facts(**known: Any) -> RequestFacts:
    return FACTS._replace(**known)


def decide(
    policy: Policy,
    tokens: Sequence[Token] = (),
    facts: RequestFacts = FACTS,
    finish: Finish = STOP,
    check: SelfCheck = NO_CHECK,
) -> tuple[Decision, int]:
    """The decision, and how many tokens were needed for it."""
    judge = policy.begin()
    decision = judge.on_request(facts)
    for count, token in enumerate(tokens):
        if decision.verdict is not Verdict.WAIT:
            return decision, count
        decision = judge.on_token(token)
    if decision.verdict is Verdict.WAIT:
        decision = judge.on_finish(finish)
    if decision.verdict is Verdict.WAIT:
        assert policy.question is not None
        decision = judge.on_check(check)
    assert decision.verdict is not Verdict.WAIT
    return decision, len(tokens)


def verdict(policy: Policy, **told: Any) -> Verdict:
    return decide(policy, **told)[0].verdict


def reason(policy: Policy, **told: Any) -> str:
    return decide(policy, **told)[0].reason


def own(values: Sequence[float]) -> list[Token]:
    return [Token(value) for value in values]


def _token(logprobs: list[float]) -> Token:
    return Token(max(logprobs), tuple(logprobs))


tokens = st.lists(st.lists(st.floats(-20, 0), min_size=5, max_size=8).map(_token), min_size=1, max_size=24)
"""Answers whose tokens come with five to eight alternatives."""
