"""The life of a request: the first tier answers, the policy judges, the next tier takes over with the KV.

This is the one place that decides who answers. What it hands back is an answer that has begun: its first content
is there, the policy has said keep, and the rest follows from the attempt.
"""

from __future__ import annotations

import logging

from policies import Decision, Judge, RequestFacts, Verdict
from router import partial
from router.attempt import Attempt
from router.budget import Budget
from router.climb import Answer, Climb
from router.config import Config
from router.errors import ApiError, UpstreamError
from router.fleet import Fleet, Fleets
from router.health import Monitor
from router.lifter import Lifter
from router.record import Record
from router.request import Request
from router.routes import Route
from router.self_check import Checker
from router.shadow import Shadows
from router.sticky import Seat, Sticky
from router.traffic import Counters, Recent

log = logging.getLogger(__name__)


class Cascade:
    """The tiers of one config. Of past requests it knows their share that escalated, and who answered whom."""

    def __init__(self, config: Config, fleets: Fleets, monitor: Monitor, shadows: Shadows, counters: Counters) -> None:
        self._config = config
        self._fleets = fleets
        self._lifter = Lifter(config, monitor)
        self._shadows = shadows
        self._checker = Checker(config.limits, counters)
        self._recent = Recent()
        self._sticky = Sticky(config.sticky_s)

    async def answer(self, request: Request, route: Route, record: Record) -> Answer:
        """The first answer that may be shown. Raises `ApiError` where no tier gives one.

        Cancelling it aborts whatever runs at a worker.
        """
        climb = Climb(request, route, record, Budget(self._config.limits))
        tier = self._first_tier(climb)
        while True:
            found = await self._visit(climb, tier)
            if route.policy is not None and not record.escalated:
                self._recent.add(isinstance(found, Decision))
            if isinstance(found, Answer):
                return found
            record.escalate(found.reason)
            later = climb.later(tier)
            tier = found.tier if found.tier in later else later[0]

    def complete(self, request: Request, route: Route, answer: Answer) -> None:
        """The answer has ended well, and the client is about to have the last of it."""
        answer.attempt.record.end()
        if answer.seat is not None:
            self._sticky.take(request, route.name, answer.attempt.finish(), answer.seat)

    def follow_up(self, request: Request, answer: Answer) -> None:
        """What is left to do once the client has the answer, or an error in place of its end. Returns at once."""
        if answer.shadow is not None and answer.attempt.record.outcome == "answered":
            self._shadows.start(request, answer.shadow, answer.attempt.finish())

    def _first_tier(self, climb: Climb) -> str:
        """Where the request's hints send it, or its conversation went before, or the first tier of its route."""
        if tier := self._lifter.hinted_tier(climb):
            return tier
        climb.seat = self._seat(climb)
        if climb.seat is not None:
            climb.record.stick()
            return climb.seat.tier
        return climb.route.tiers[0]

    def _seat(self, climb: Climb) -> Seat | None:
        """The conversation's seat; None where it has none that can be kept."""
        if climb.route.policy is None or climb.request.options.lift == "require":
            return None
        seat = self._sticky.find(climb.request, climb.route.name)
        return None if seat is None or self._fleets[seat.tier].why_not() else seat

    async def _visit(self, climb: Climb, tier: str) -> Answer | Decision:
        """The answer of a tier, or the decision to leave it. Raises `ApiError` where there is neither."""
        request, record, fleet = climb.request, climb.record, self._fleets[tier]
        later, policy = climb.later(tier), climb.policy_at(tier)
        judge = policy.begin()
        opening = self._opening(climb, tier, judge) if later else _no_choice(climb.route)
        if later and (reason := _why_not(fleet, request, opening)):
            record.skip(tier, reason)
            return Decision.escalate(reason, opening.tier)
        worker = fleet.choose(climb.conversation)
        namespace = await self._lifter.namespace(climb, worker)
        body = request.for_worker(
            fleet.served, judged_by=self._alternatives(climb, tier), namespace=namespace, partial=climb.partial
        )
        attempt = Attempt(
            worker,
            request.path,
            body,
            self._config.limits,
            climb.budget,
            record.begin(tier, fleet.served),
            lambda tried: fleet.other(climb.conversation, tried),
        )
        if not later:
            attempt.commit()
        answer = Answer([], attempt, climb.partial)
        for event in climb.partial.events if climb.partial else ():
            attempt.whole.add(event)
        try:
            decision = await self._ask(climb, tier, answer, judge, opening)
        except UpstreamError as error:
            if not later or not error.escalates:
                raise
            log.warning("attempt failed, escalating: tier=%s reason=%s", tier, error.reason)
            return Decision.escalate(error.reason)
        if decision.verdict is Verdict.KEEP:
            if not record.escalated:
                record.reason = decision.reason
            elif climb.route.policy is not None:
                answer.seat = Seat(tier, namespace)
            answer.shadow = later[0] if decision.shadow and later else None
            return answer
        if namespace is None:
            climb.sources.append(attempt.worker)
        return decision

    def _alternatives(self, climb: Climb, tier: str) -> int | None:
        """How many the worker is asked for, None: no log-probabilities. They also count the tokens of a partial."""
        wanted = climb.policy_at(tier).top_logprobs
        counts = bool(climb.later(tier)) and self._escalation(climb) == "continue" and climb.request.stream
        return 0 if counts and wanted is None else wanted

    def _escalation(self, climb: Climb) -> str:
        return climb.request.options.escalation or self._config.escalation

    def _opening(self, climb: Climb, tier: str, judge: Judge) -> Decision:
        """What the policy says before the attempt. A request that is where it was sent is answered there."""
        decision = judge.on_request(self._facts(climb, tier))
        there = decision.tier is not None and decision.tier not in climb.later(tier)
        return Decision.keep(decision.reason) if there else decision

    def _facts(self, climb: Climb, tier: str) -> RequestFacts:
        facts = climb.request.facts()
        counted = climb.record.prompt_tokens
        return facts._replace(
            prompt_tokens=facts.prompt_tokens if counted is None else counted,
            tier=tier,
            tiers=tuple(fleet.state() for fleet in self._fleets.values()),
            calls_used=climb.budget.calls_used,
            escalated_share=self._recent.escalated_share(),
        )

    async def _ask(self, climb: Climb, tier: str, answer: Answer, judge: Judge, opening: Decision) -> Decision:
        """Runs an attempt up to its decision. Only a kept one is still open afterwards."""
        attempt = answer.attempt
        outcome, reason = "cancelled", "cancelled"
        try:
            decision = await _decide(answer, judge, opening)
            if decision.verdict is Verdict.WAIT:
                check = await self._checker.ask(climb.request, climb.policy_at(tier), attempt, climb.budget)
                decision = judge.on_check(check)
            outcome, reason = "discarded", decision.reason
            if decision.verdict is Verdict.KEEP:
                outcome = "answered"
                attempt.commit()
            elif self._escalation(climb) == "continue" and self._takes_over(climb, answer):
                outcome = "continued"
        except ApiError as error:
            outcome, reason = "failed", error.code
            raise
        finally:
            attempt.record.confidence = judge.score()
            attempt.record.decided(outcome, reason)
            if climb.request.options.debug and outcome != "answered":
                attempt.record.text = attempt.whole.text
            if outcome != "answered":
                await attempt.aclose()
        return decision

    def _takes_over(self, climb: Climb, answer: Answer) -> bool:
        """Makes what was answered so far the start of the next tier's answer. Where it cannot be, the record says so."""
        found = climb.request.why_restart() or partial.begin(climb.partial, answer.held, climb.request.answer_limit())
        climb.partial = None if isinstance(found, str) else found
        if isinstance(found, str):
            climb.record.restart(found)
        return climb.partial is not None


def _no_choice(route: Route) -> Decision:
    return Decision.keep("pinned" if route.policy is None else "last_tier")


def _why_not(fleet: Fleet, request: Request, opening: Decision) -> str | None:
    """Why a tier that may be passed over is not asked at all."""
    if fault := fleet.why_not():
        return fault
    context, limit = fleet.context_length(), request.answer_limit()
    if context is not None and limit is not None and limit >= context:
        return "context_length"
    return opening.reason if opening.verdict is Verdict.ESCALATE else None


async def _decide(answer: Answer, judge: Judge, opening: Decision) -> Decision:
    """Reads events into the answer until the judge has decided and, to keep it, there is content to show."""
    decision = opening
    has_content = False
    async for event in answer.attempt:
        answer.held.append(event)
        has_content = has_content or event.has_content()
        for token in event.tokens():
            answer.attempt.record.tokens_seen += 1
            if decision.verdict is Verdict.WAIT:
                decision = judge.on_token(token)
        if decision.verdict is Verdict.ESCALATE or (decision.verdict is Verdict.KEEP and has_content):
            return decision
    return judge.on_finish(answer.attempt.finish()) if decision.verdict is Verdict.WAIT else decision
