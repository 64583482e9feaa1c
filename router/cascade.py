"""The life of a request: the first tier answers, the policy judges, the next tier takes over with the KV.

This is the one place that decides who answers. What it hands back is an answer that has begun: its first content
is there, the policy has said keep, and the rest follows from the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from policies import Decision, Judge, Policy, RequestFacts, Verdict
from policies.fixed import Never
from router import lifting
from router.attempt import Attempt, Budget
from router.config import Config
from router.errors import ApiError, Unavailable, UpstreamError, UpstreamRefused
from router.events import ChatEvent
from router.health import Monitor
from router.record import Record
from router.request import ChatRequest
from router.routes import Route
from router.self_check import Checker
from router.shadow import Shadows
from router.traffic import Counters, Recent
from router.worker import Worker

log = logging.getLogger(__name__)

_KEEP_ALL: Policy = Never()


@dataclass(slots=True)
class Answer:
    """An answer that has begun: the events held back so far, and the attempt that goes on with them.

    `shadow`: the tier that is asked the same once the client has its answer, or None. The owner closes the attempt.
    """

    held: list[ChatEvent]
    attempt: Attempt
    shadow: str | None = None


@dataclass(frozen=True, slots=True)
class _Climb:
    """One request on its way up the tiers."""

    request: ChatRequest
    route: Route
    record: Record
    budget: Budget
    sources: list[Worker] = field(default_factory=list)  # those that computed this prompt's KV themselves, in order

    def later(self, tier: str) -> tuple[str, ...]:
        """The tiers after `tier`."""
        return self.route.tiers[self.route.tiers.index(tier) + 1 :]

    def policy_at(self, tier: str) -> Policy:
        """What judges the answer of a tier; that of the last one is kept."""
        return self.route.policy if self.route.policy is not None and self.later(tier) else _KEEP_ALL


class Cascade:
    """The tiers of one config. Holds nothing of a request."""

    def __init__(
        self,
        config: Config,
        workers: Mapping[str, Worker],
        monitor: Monitor,
        shadows: Shadows,
        counters: Counters,
    ) -> None:
        self._config = config
        self._workers = workers
        self._monitor = monitor
        self._shadows = shadows
        self._counters = counters
        self._checker = Checker(config.limits, counters)
        self._recent = Recent()

    async def answer(self, request: ChatRequest, route: Route, record: Record) -> Answer:
        """The first answer that may be shown. Raises `ApiError` where no tier gives one.

        Cancelling it aborts whatever runs at a worker.
        """
        climb = _Climb(request, route, record, Budget(self._config.limits))
        tier = route.tiers[0]
        while True:
            found = await self._visit(climb, tier)
            if route.policy is not None and not record.escalated:
                self._recent.add(isinstance(found, Decision))
            if isinstance(found, Answer):
                return found
            record.escalate(found.reason)
            tier = self._next(climb, tier, found)

    def follow_up(self, request: ChatRequest, answer: Answer) -> None:
        """What is left to do once the client has the answer, or an error in place of its end. Returns at once."""
        if answer.shadow is not None and answer.attempt.record.outcome == "answered":
            self._shadows.start(request, answer.shadow, answer.attempt.finish())

    async def _visit(self, climb: _Climb, tier: str) -> Answer | Decision:
        """The answer of a tier, or the decision to leave it. Raises `ApiError` where there is neither."""
        request, record, worker = climb.request, climb.record, self._workers[tier]
        later, policy = climb.later(tier), climb.policy_at(tier)
        judge = policy.begin()
        opening = self._opening(climb, tier, judge) if later else _no_choice(climb.route)
        if later and (reason := self._why_not(worker, request, opening)):
            record.skip(tier, reason)
            return Decision.escalate(reason, opening.tier)
        namespace = await self._lift(climb, worker) if record.escalated else None
        body = request.for_worker(worker.tier.served, judged_by=policy.top_logprobs, namespace=namespace)
        attempt = Attempt(worker, body, self._config.limits, climb.budget, record.begin(tier, worker.tier.served))
        if not later:
            attempt.commit()
        answer = Answer([], attempt)
        try:
            decision = await self._ask(climb, worker, answer, judge, opening)
        except UpstreamError as error:
            if not later or not error.escalates:
                raise
            log.warning("attempt failed, escalating: tier=%s reason=%s", tier, error.reason)
            return Decision.escalate(error.reason)
        if decision.verdict is Verdict.KEEP:
            if not record.escalated:
                record.reason = decision.reason
            answer.shadow = later[0] if decision.shadow and later else None
            return answer
        if namespace is None:
            climb.sources.append(worker)
        return decision

    def _opening(self, climb: _Climb, tier: str, judge: Judge) -> Decision:
        """What the policy says before the attempt. A request that it sent to this tier is answered here."""
        decision = judge.on_request(self._facts(climb, tier))
        if decision.verdict is Verdict.ESCALATE and self._is_ignored(climb, tier, decision):
            return Decision.keep(decision.reason)
        return decision

    def _next(self, climb: _Climb, tier: str, decision: Decision) -> str:
        """The tier after `tier`, or the one that the decision names."""
        if decision.tier is None or self._is_ignored(climb, tier, decision):
            return climb.later(tier)[0]
        return decision.tier

    def _is_ignored(self, climb: _Climb, tier: str, decision: Decision) -> bool:
        """True where the decision names a tier that does not come later; counts and notes it."""
        if decision.tier is None or decision.tier in climb.later(tier):
            return False
        climb.record.notes.append(
            f"{decision.reason}: the policy named {decision.tier!r}, which does not follow {tier!r}"
        )
        self._counters.tiers_ignored += 1
        return True

    def _facts(self, climb: _Climb, tier: str) -> RequestFacts:
        return climb.request.facts()._replace(
            prompt_tokens=climb.record.prompt_tokens,
            tier=tier,
            tiers=self._monitor.states(),
            calls_used=climb.budget.calls_used,
            escalated_share=self._recent.escalated_share(),
        )

    async def _ask(self, climb: _Climb, worker: Worker, answer: Answer, judge: Judge, opening: Decision) -> Decision:
        """Runs an attempt up to its decision. Only a kept one is still open afterwards."""
        attempt = answer.attempt
        outcome, reason = "cancelled", "cancelled"
        try:
            decision = await _decide(answer, judge, opening)
            if decision.verdict is Verdict.WAIT:
                policy = climb.policy_at(worker.name)
                check = await self._checker.ask(worker, climb.request, policy, attempt, climb.budget)
                decision = judge.on_check(check)
            outcome, reason = "discarded", decision.reason
            if decision.verdict is Verdict.KEEP:
                outcome = "answered"
                attempt.commit()
        except ApiError as error:
            outcome, reason = "failed", error.code
            if isinstance(error, UpstreamRefused):
                self._monitor[error.tier].miss(error)
            raise
        finally:
            attempt.record.confidence = judge.score()
            attempt.record.decided(outcome, reason)
            if climb.request.options.debug and outcome != "answered":
                attempt.record.text = attempt.whole.text
            if outcome != "answered":
                await attempt.aclose()
        return decision

    def _why_not(self, worker: Worker, request: ChatRequest, opening: Decision) -> str | None:
        """Why a tier that may be passed over is not asked at all."""
        health = self._monitor[worker.name]
        if not health.up:
            return "tier_down"
        reported = health.capabilities.context_length if health.capabilities else None
        context, limit = worker.tier.context_length or reported, request.answer_limit()
        if context is not None and limit is not None and limit >= context:
            return "context_length"
        return opening.reason if opening.verdict is Verdict.ESCALATE else None

    async def _lift(self, climb: _Climb, target: Worker) -> str | None:
        """The namespace of the lifted KV, or None for a native prefill. Raises `Unavailable` for a required lift."""
        record, wish = climb.record, climb.request.options.lift
        if climb.sources and wish != "never":
            outcome = await self._try_lift(climb, target)
            record.lift = outcome.record
            if outcome.namespace is not None:
                return outcome.namespace
        if wish == "require":
            why = record.lift.reason if record.lift else f"no tier holds this prompt's KV ({record.reason})"
            raise Unavailable(f"kvlift.lift is 'require' and the lift was not applied: {why}", code="lift_not_applied")
        return None

    async def _try_lift(self, climb: _Climb, target: Worker) -> lifting.LiftOutcome:
        """Lifts from the nearest source that can. Where none can, the outcome says why the nearest cannot."""
        why_nearest = ""
        for source in reversed(climb.sources):
            pack = self._config.pack(source.name, target.name)
            abilities = self._monitor[source.name].capabilities, self._monitor[target.name].capabilities
            if reason := lifting.why_unsupported(*abilities, pack):
                why_nearest = why_nearest or reason
                continue
            assert pack is not None
            native = climb.request.for_worker(target.tier.served, judged_by=None, namespace=None)
            left = climb.budget.seconds_left()
            return await lifting.lift(self._config.lift, source, target, pack, native, climb.request.options, left)
        return lifting.unsupported(why_nearest)


def _no_choice(route: Route) -> Decision:
    return Decision.keep("pinned" if route.policy is None else "last_tier")


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
