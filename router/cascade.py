"""The life of a request: the first tier answers, the policy judges, the next tier takes over with the KV.

This is the one place that decides who answers. What it hands back is an answer that has begun: its first content
is there, the policy has said keep, and the rest follows from the attempt.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from policies import Decision, Finish, Judge, Policy, Verdict
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
from router.worker import Worker

log = logging.getLogger(__name__)

_KEEP_ALL: Policy = Never()


@dataclass(slots=True)
class Answer:
    """An answer that has begun: the events held back so far, and the attempt that goes on with them.

    The owner closes the attempt.
    """

    held: list[ChatEvent]
    attempt: Attempt


class Cascade:
    """The tiers of one config. Holds nothing of a request."""

    def __init__(self, config: Config, workers: Mapping[str, Worker], monitor: Monitor) -> None:
        self._config = config
        self._workers = workers
        self._monitor = monitor

    async def answer(self, request: ChatRequest, route: Route, record: Record) -> Answer:
        """The first answer that may be shown. Raises `ApiError` where no tier gives one.

        Cancelling it aborts whatever runs at a worker.
        """
        budget = Budget(self._config.limits)
        source: Worker | None = None  # the worker that holds this prompt's KV
        for tier in route.tiers:
            worker = self._workers[tier]
            is_last = tier == route.tiers[-1]
            policy = _KEEP_ALL if is_last or route.policy is None else route.policy
            judge = policy.begin()
            opening = _no_choice(route) if is_last else judge.on_request(request.facts())
            if not is_last and (reason := self._why_not(worker, request, opening)):
                record.skip(tier, reason)
                source = None
                continue
            namespace = await self._lift(request, source, worker, record, budget) if record.escalated else None
            body = request.for_worker(worker.tier.served, judged_by=policy.top_logprobs, namespace=namespace)
            attempt = Attempt(worker, body, self._config.limits, budget, record.begin(tier, worker.tier.served))
            if is_last:
                attempt.commit()
            try:
                answer, decision = await self._ask(attempt, judge, opening, request)
            except UpstreamError as error:
                if is_last or not error.escalates:
                    raise
                log.warning("attempt failed, escalating: tier=%s reason=%s", tier, error.reason)
                record.escalate(error.reason)
                source = None
                continue
            if decision.verdict is Verdict.KEEP:
                if not record.escalated:
                    record.reason = decision.reason
                return answer
            record.escalate(decision.reason)
            source = worker
        raise AssertionError("the last tier's answer is kept, or its error raised")

    async def _ask(
        self, attempt: Attempt, judge: Judge, opening: Decision, request: ChatRequest
    ) -> tuple[Answer, Decision]:
        """Runs an attempt up to its decision. Only a kept one is still open afterwards."""
        answer = Answer([], attempt)
        outcome, reason = "cancelled", "cancelled"
        try:
            decision = await _decide(answer, judge, opening)
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
            if request.options.debug and outcome != "answered":
                attempt.record.text = "".join(event.text() for event in answer.held)
            if outcome != "answered":
                await attempt.aclose()
        return answer, decision

    def _why_not(self, worker: Worker, request: ChatRequest, opening: Decision) -> str | None:
        """Why a tier that may be passed over is not asked at all."""
        health = self._monitor[worker.name]
        if not health.up:
            return "tier_down"
        reported = health.capabilities.context_length if health.capabilities else None
        context = worker.tier.context_length or reported
        if context is not None and request.answer_tokens() >= context:
            return "context_length"
        return opening.reason if opening.verdict is Verdict.ESCALATE else None

    async def _lift(
        self, request: ChatRequest, source: Worker | None, target: Worker, record: Record, budget: Budget
    ) -> str | None:
        """The namespace of the lifted KV, or None for a native prefill. Raises `Unavailable` for a required lift."""
        wish = request.options.lift
        if source is not None and wish != "never":
            outcome = await self._try_lift(request, source, target, budget)
            record.lift = outcome.record
            if outcome.namespace is not None:
                return outcome.namespace
        if wish == "require":
            why = record.lift.reason if record.lift else f"no tier holds this prompt's KV ({record.reason})"
            raise Unavailable(f"kvlift.lift is 'require' and the lift was not applied: {why}", code="lift_not_applied")
        return None

    async def _try_lift(
        self, request: ChatRequest, source: Worker, target: Worker, budget: Budget
    ) -> lifting.LiftOutcome:
        pack = self._config.pack(source.name, target.name)
        abilities = self._monitor[source.name].capabilities, self._monitor[target.name].capabilities
        if reason := lifting.why_unsupported(*abilities, pack):
            return lifting.unsupported(reason)
        assert pack is not None
        native = request.for_worker(target.tier.served, judged_by=None, namespace=None)
        rho = request.options.rho
        return await lifting.lift(self._config.lift, source, target, pack, native, rho, budget.seconds_left())


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
    return judge.on_finish(Finish(answer.attempt.finish_reason)) if decision.verdict is Verdict.WAIT else decision
