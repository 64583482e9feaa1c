"""The workers of one tier, and which of them a request is sent to.

A conversation goes back to the worker that has its prefix in its cache; every other request to the one with the
least to do. A worker that is down, or whose breaker is open, gets neither.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any, Literal

from policies import TierState
from router.config import Config
from router.conversation import Conversation, Recall
from router.errors import Unavailable
from router.health import Monitor, WorkerHealth
from router.worker import Worker

_HELD_S = 3600.0  # a prefix that nobody asked for in an hour has left a busy worker's cache

Fault = Literal["tier_down", "breaker_open"]


class Fleet:
    """One tier: its workers, and the conversations that they hold."""

    def __init__(self, name: str, members: Sequence[WorkerHealth]) -> None:
        self.name = name
        self.served = members[0].worker.tier.served
        self._members = members
        self._holders: Recall[Worker] = Recall(_HELD_S)
        self._turn = 0
        self._last_turn = {member.worker.name: 0 for member in members}

    def why_not(self) -> Fault | None:
        """Why no worker can be asked now: all are down, or the breakers of those that are up are open."""
        up = [member for member in self._members if member.up]
        if not up:
            return "tier_down"
        return None if any(member.worker.breaker.may_call() for member in up) else "breaker_open"

    def choose(self, conversation: Conversation) -> Worker:
        """The worker to ask, also where all are down: that is no more than what the last probes said.

        It is noted as the holder of the conversation, and the call as the trial of an open breaker.
        Raises `Unavailable` where every breaker is open.
        """
        worker = self._best(conversation, (), self._up) or self._best(conversation, (), self._members)
        if worker is None:
            seconds = min(member.worker.breaker.seconds_shut() for member in self._members)
            raise Unavailable(
                f"tier {self.name!r}: its workers failed too often (breaker.failures); they are tried again soon",
                code="breaker_open",
                retry_after_s=seconds,
            )
        return self._take(worker, conversation)

    def other(self, conversation: Conversation, tried: Container[Worker]) -> Worker | None:
        """Another worker that is up, in place of those that could not be asked."""
        worker = self._best(conversation, tried, self._up)
        return None if worker is None else self._take(worker, conversation)

    def context_length(self) -> int | None:
        """Tokens; None where neither the config nor a worker tells it. Of several workers the least."""
        told = [member.capabilities.context_length for member in self._members if member.capabilities]
        reported = min((length for length in told if length is not None), default=None)
        return self._members[0].worker.tier.context_length or reported

    def state(self) -> TierState:
        """The tier as a policy sees it."""
        queued = [member.queued for member in self._members if member.queued is not None]
        in_flight = sum(member.worker.in_flight.count for member in self._members)
        return TierState(self.name, self.why_not() is None, in_flight, sum(queued) if queued else None)

    def as_json(self) -> dict[str, Any]:
        state = self.state()
        return {
            "up": any(member.up for member in self._members),
            "in_flight": state.in_flight,
            "queued": state.queued,
            "workers": [member.as_json() for member in self._members],
        }

    @property
    def up(self) -> bool:
        return bool(self._up)

    @property
    def _up(self) -> list[WorkerHealth]:
        return [member for member in self._members if member.up]

    def _best(
        self, conversation: Conversation, tried: Container[Worker], among: Sequence[WorkerHealth]
    ) -> Worker | None:
        ready = [member for member in among if member.worker not in tried and member.worker.breaker.may_call()]
        holder = self._holders.find(conversation)
        if holder is not None and any(member.worker is holder for member in ready):
            return holder
        return min(ready, key=self._burden).worker if ready else None

    def _burden(self, member: WorkerHealth) -> tuple[int, int]:
        """What a worker has to do; of those with the same, the one that was chosen longest ago comes first."""
        return member.worker.in_flight.count + (member.queued or 0), self._last_turn[member.worker.name]

    def _take(self, worker: Worker, conversation: Conversation) -> Worker:
        self._turn += 1
        self._last_turn[worker.name] = self._turn
        self._holders.note(conversation, worker)
        worker.breaker.take()
        return worker


Fleets = Mapping[str, Fleet]
"""All tiers by name, in the order of escalation."""


def make_workers(config: Config) -> list[Worker]:
    """The workers of all tiers. Raises `ConfigError` where an address or key is not known."""
    return [
        Worker(tier, tier.worker_name(index), replica, config.limits, config.breaker)
        for tier in config.tiers
        for index, replica in enumerate(tier.workers())
    ]


def make_fleets(config: Config, monitor: Monitor) -> Fleets:
    """The tiers of a config, over the health of their workers."""
    return {
        tier.name: Fleet(tier.name, [monitor[tier.worker_name(index)] for index in range(len(tier.workers()))])
        for tier in config.tiers
    }
