"""What all rules share: a rule escalates where it finds its reason, and keeps with `no_match` where it does not.

Alone, a rule lets every other answer of the small model through; it is meant as one part of `any`, `all` or
`weighted`. A rule on the request or the answer whose signal was not measured escalates with `no_signal`: what
nobody looked at is not easy. Rules on tiers (`policies.tier_rules`) keep in that case, and say why.
"""

from __future__ import annotations

from abc import abstractmethod

from policies.base import Judge, Policy
from policies.fields import TierName
from policies.signals import Decision, Finish, RequestFacts

NO_MATCH = "no_match"
NO_SIGNAL = "no_signal"


class Rule(Policy):
    """A reason to escalate. `to` sends the request straight to that tier; unset: to the next one."""

    to: TierName | None = None

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset() if self.to is None else frozenset({self.to})

    def decide(self, reason: str | None) -> Decision:
        return Decision.keep(NO_MATCH) if reason is None else Decision.escalate(reason, self.to)


class RequestRule(Rule):
    """A rule that reads the request alone: a match passes the small model by."""

    @abstractmethod
    def match(self, facts: RequestFacts) -> str | None:
        """The word for why this request escalates, or None."""

    def begin(self) -> Judge:
        return _RequestJudge(self)


class AnswerRule(Rule):
    """A rule that reads the whole answer, and what was asked for."""

    @abstractmethod
    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        """The word for why this answer escalates, or None."""

    def begin(self) -> Judge:
        return _AnswerJudge(self)


class DecidedAtOnce(Judge):
    """Keeps to what it decided before the attempt."""

    _decision = Decision.keep(NO_MATCH)

    def on_finish(self, finish: Finish) -> Decision:
        return self._decision


class _RequestJudge(DecidedAtOnce):
    def __init__(self, rule: RequestRule) -> None:
        self._rule = rule

    def on_request(self, facts: RequestFacts) -> Decision:
        self._decision = self._rule.decide(self._rule.match(facts))
        return self._decision


class _AnswerJudge(Judge):
    def __init__(self, rule: AnswerRule) -> None:
        self._rule = rule
        self._facts = RequestFacts(characters=0, messages=0, has_tools=False, wants_json=False)

    def on_request(self, facts: RequestFacts) -> Decision:
        self._facts = facts
        return super().on_request(facts)

    def on_finish(self, finish: Finish) -> Decision:
        return self._rule.decide(self._rule.match(self._facts, finish))
