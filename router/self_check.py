"""Asks a worker what it thinks of its own answer. What fails here costs the reply, never the request."""

from __future__ import annotations

import logging

from policies import Policy, SelfCheck
from router.attempt import Attempt
from router.budget import Budget
from router.config import Limits
from router.errors import ApiError
from router.record import AttemptRecord
from router.request import Request
from router.traffic import Counters

log = logging.getLogger(__name__)

_LEAVES = 1  # call for the next tier: a question must not cost the request its answer


class Checker:
    """Puts a policy's question to the worker that has answered."""

    def __init__(self, limits: Limits, counters: Counters) -> None:
        self._limits = limits.once()  # a retry could take the call that is left for the next tier
        self._counters = counters

    async def ask(self, request: Request, policy: Policy, answered: Attempt, budget: Budget) -> SelfCheck:
        """The reply's first alternatives; none where the call failed, or is not made because it would be the last one.

        `answered` is the complete attempt that the question is about; the call is told in its record.
        """
        assert policy.question is not None
        worker = answered.worker
        record = answered.record.check = AttemptRecord(worker.tier.name, worker.tier.served)
        if budget.calls_left <= _LEAVES:
            return self._failed(record, "max_calls")
        body = request.for_check(worker.tier.served, answered.finish(), policy.question, policy.question_logprobs)
        if body is None:
            return self._failed(record, "no_conversation")
        attempt = Attempt(worker, request.path, body, self._limits, budget, record)
        try:
            (event,) = [event async for event in attempt]
            record.decided("answered", "self_check")
        except ApiError as error:
            return self._failed(record, error.code)
        finally:
            await attempt.aclose()
        return SelfCheck(tuple(event.first_alternatives()))

    def _failed(self, record: AttemptRecord, reason: str) -> SelfCheck:
        record.decided("failed", reason)
        self._counters.checks_failed += 1
        log.warning("self check failed: tier=%s reason=%s", record.tier, reason)
        return SelfCheck()
