"""What would the next tier have said? Kept requests that a policy marks are asked again, off the path.

A shadow call starts when the client has its whole answer, and nothing of it reaches the client. It is native, bounded
by the limits of an attempt, and one of at most `limits.max_shadow`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from policies import Finish
from router.attempt import Attempt
from router.budget import Budget
from router.config import Limits
from router.conversation import Conversation
from router.errors import ApiError
from router.fleet import Fleets
from router.record import AttemptRecord
from router.request import Request
from router.traffic import Counters, Shadow
from router.worker import Worker

log = logging.getLogger(__name__)


class Shadows:
    """The shadow calls that run now; the counters say how all others ended."""

    def __init__(
        self, fleets: Fleets, limits: Limits, counters: Counters, told: Callable[[AttemptRecord], None]
    ) -> None:
        """`told` is handed the record of each call that was made, at its end."""
        self._fleets = fleets
        self._limits = limits.once()
        self._counters = counters
        self._told = told
        self._running: set[asyncio.Task[None]] = set()

    def start(self, request: Request, tier: str, kept: Finish) -> None:
        """Asks `tier` what was answered with `kept`. Returns at once."""
        fleet = self._fleets[tier]
        if len(self._running) >= self._limits.max_shadow or fleet.why_not():
            self._counters.shadow["dropped"] += 1
            return
        task = asyncio.create_task(self._compare(request, fleet.choose(Conversation(request.body)), kept))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Cancels what runs."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _compare(self, request: Request, worker: Worker, kept: Finish) -> None:
        body = request.for_worker(worker.tier.served, judged_by=None, namespace=None)
        record = AttemptRecord(worker.tier.name, worker.tier.served)
        attempt = Attempt(worker, request.path, body, self._limits, Budget(self._limits), record)
        outcome: Shadow = "failed"
        try:
            async for _ in attempt:
                pass
            outcome = "agreed" if agree(kept, attempt.finish()) else "disagreed"
        except ApiError as error:
            log.warning("shadow failed: tier=%s reason=%s", worker.tier.name, error.code)
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self._counters.shadow[outcome] += 1
            record.decided(outcome, "shadow")
            self._told(record)
            log.info("shadow: tier=%s outcome=%s", worker.tier.name, outcome)
            await attempt.aclose()


def agree(one: Finish, other: Finish) -> bool:
    """True where both say the same, but for white space."""
    return _plain(one) == _plain(other)


def _plain(answer: Finish) -> tuple[str, list[tuple[str, str]]]:
    return _words(answer.text or ""), [(call.name, _words(call.arguments)) for call in answer.tool_calls or ()]


def _words(text: str) -> str:
    return " ".join(text.split())
