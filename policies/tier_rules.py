"""Rules on the tiers and on what a request may cost. They ask for the router's own state, not the models'.

`tier_busy` is a reason to leave the tier that is asked. `tier_ready` and `budget` are permissions: they answer
escalate while the escalation may be afforded and keep where it may not, so they belong into an `all` beside the
policy that wants to escalate. A state that the router does not tell is answered by keep, with `no_signal`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field

from policies.base import Judge, Policy
from policies.fields import Share, TierName
from policies.rules import NO_SIGNAL, DecidedAtOnce, Rule
from policies.signals import Decision, RequestFacts, TierState


class TierBusy(Rule):
    """Escalates while a tier answers at least `in_flight` requests, or at least `queued` wait. Word: `tier_busy`.

    `tier` unset: the one that is asked. Defaults: 64 in flight; the queue is not read.
    """

    method: Literal["tier_busy"] = "tier_busy"
    tier: TierName | None = None
    in_flight: int = Field(default=64, ge=1)
    queued: int | None = Field(default=None, ge=1)

    @property
    def tiers(self) -> frozenset[str]:
        return super().tiers | _named(self.tier)

    def begin(self) -> Judge:
        return _StateJudge(self)

    def judge(self, facts: RequestFacts) -> Decision:
        state = _state(facts, self.tier or facts.tier)
        if state is None:
            return Decision.keep(NO_SIGNAL)
        if state.in_flight >= self.in_flight:
            return self.decide("tier_busy")
        if self.queued is None:
            return self.decide(None)
        if state.queued is None:
            return Decision.keep(NO_SIGNAL)
        return self.decide("tier_busy" if state.queued >= self.queued else None)


class Permission(Policy):
    """Escalates while nothing forbids it. Part of an `all`."""

    def begin(self) -> Judge:
        return _StateJudge(self)

    def judge(self, facts: RequestFacts) -> Decision:
        reason = self.forbid(facts)
        return Decision.escalate("permitted") if reason is None else Decision.keep(reason)

    @abstractmethod
    def forbid(self, facts: RequestFacts) -> str | None:
        """The word for why this request may not escalate, or None."""


class TierReady(Permission):
    """Permits to escalate while a tier is healthy and has fewer than `in_flight` requests and `queued` waiting.

    `tier` unset: the one after the tier that is asked. Words: `permitted`, `target_down`, `target_busy`. Default:
    health alone; a limit that is not set is not read.
    """

    method: Literal["tier_ready"] = "tier_ready"
    tier: TierName | None = None
    in_flight: int | None = Field(default=None, ge=1)
    queued: int | None = Field(default=None, ge=1)

    @property
    def tiers(self) -> frozenset[str]:
        return _named(self.tier)

    def forbid(self, facts: RequestFacts) -> str | None:
        state = _next(facts) if self.tier is None else _state(facts, self.tier)
        if state is None:
            return NO_SIGNAL
        if not state.healthy:
            return "target_down"
        for limit, value in ((self.in_flight, state.in_flight), (self.queued, state.queued)):
            if limit is not None and value is None:
                return NO_SIGNAL
            if limit is not None and value is not None and value >= limit:
                return "target_busy"
        return None


class Budget(Permission):
    """Permits to escalate while the request has made fewer than `calls` chat calls and fewer than `share` of the
    recent requests escalated, whichever is set.

    Words: `permitted`, `calls_spent`, `share_spent`. Default: a share of 0.5; calls are not read.
    """

    method: Literal["budget"] = "budget"
    share: Share | None = 0.5
    calls: int | None = Field(default=None, ge=1)

    def forbid(self, facts: RequestFacts) -> str | None:
        if self.calls is not None:
            if facts.calls_used is None:
                return NO_SIGNAL
            if facts.calls_used >= self.calls:
                return "calls_spent"
        if self.share is not None:
            if facts.escalated_share is None:
                return NO_SIGNAL
            if facts.escalated_share >= self.share:
                return "share_spent"
        return None


class _StateJudge(DecidedAtOnce):
    def __init__(self, policy: TierBusy | Permission) -> None:
        self._policy = policy

    def on_request(self, facts: RequestFacts) -> Decision:
        self._decision = self._policy.judge(facts)
        return self._decision


def _named(tier: str | None) -> frozenset[str]:
    return frozenset() if tier is None else frozenset({tier})


def _state(facts: RequestFacts, name: str) -> TierState | None:
    return next((state for state in facts.tiers if state.name == name), None)


def _next(facts: RequestFacts) -> TierState | None:
    names = [state.name for state in facts.tiers]
    after = names.index(facts.tier) + 1 if facts.tier in names else len(names)
    return facts.tiers[after] if after < len(names) else None
