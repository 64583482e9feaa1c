"""Which workers are up, and what they can do.

Each worker is probed on its own, so that a slow or failing probe holds up no other. Several misses in a row mark
a worker down and one success marks it up again; a request that finds no connection counts as a miss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from policies import TierState
from router.config import Health
from router.errors import UpstreamError
from router.worker import Capabilities, Worker

log = logging.getLogger(__name__)


class WorkerHealth:
    """What is known of one worker. Down until its first success."""

    def __init__(self, worker: Worker, config: Health) -> None:
        self.worker = worker
        self.up = False
        self.capabilities: Capabilities | None = None
        self.queued: int | None = None  # requests that wait inside the worker, at the last probe; None: not told
        self._config = config
        self._misses = 0
        self._last_error = "not probed yet"
        self._lift_error: str | None = None

    def miss(self, error: Exception) -> None:
        """A probe or a connection failed."""
        self._misses += 1
        self._last_error = str(error) or repr(error)
        if self.up and self._misses >= self._config.misses:
            self.up = False
            self.queued = None
            self.capabilities = None  # what comes back may be another process with other packs
            log.warning("worker down: tier=%s misses=%d error=%s", self.worker.name, self._misses, self._last_error)

    async def probe(self) -> None:
        """One probe. Raises nothing: what fails is a miss."""
        try:
            await self.worker.healthy(self._config.timeout_s)
        except Exception as error:  # whatever a probe meets, the watch goes on
            self.miss(error)
            return
        if not self.up:
            log.info("worker up: tier=%s address=%s", self.worker.name, self.worker.address)
        self.up, self._misses, self._last_error = True, 0, ""
        if self.capabilities is None:
            await self._learn()
        self.queued = await self._ask_queued()

    async def watch(self) -> None:
        """Probes for ever."""
        while True:
            await asyncio.sleep(self._config.interval_s)
            await self.probe()

    def as_json(self) -> dict[str, Any]:
        return {
            "up": self.up,
            "address": self.worker.address,
            "misses": self._misses,
            "error": self._last_error or None,
            "in_flight": self.worker.in_flight.count,
            "queued": self.queued,
            "lifts": self.capabilities is not None,
            "lift_error": self._lift_error,
        }

    async def _ask_queued(self) -> int | None:
        try:
            return await self.worker.queued(self._config.timeout_s)
        except (UpstreamError, ValidationError):  # not every server tells it; `as_json` shows that it is not known
            return None

    async def _learn(self) -> None:
        try:
            self.capabilities = await self.worker.capabilities(self._config.timeout_s)
            self._lift_error = None
        except (UpstreamError, ValidationError) as error:
            reason = str(error).splitlines()[0]
            if reason != self._lift_error:  # said once, not at every probe
                log.warning("worker without lift: tier=%s reason=%s", self.worker.name, reason)
            self._lift_error = reason


class Monitor:
    """The health of all workers, by tier name."""

    def __init__(self, workers: Iterable[Worker], config: Health) -> None:
        self.by_tier = {worker.name: WorkerHealth(worker, config) for worker in workers}

    def __getitem__(self, tier: str) -> WorkerHealth:
        return self.by_tier[tier]

    def all_up(self) -> bool:
        return all(health.up for health in self.by_tier.values())

    def states(self) -> tuple[TierState, ...]:
        """The tiers as a policy sees them, in the order of escalation."""
        return tuple(
            TierState(name, health.up, health.worker.in_flight.count, health.queued)
            for name, health in self.by_tier.items()
        )

    async def run(self) -> None:
        """Probes every worker until cancelled."""
        async with asyncio.TaskGroup() as group:
            for health in self.by_tier.values():
                group.create_task(health.watch())

    async def probe_all(self) -> None:
        await asyncio.gather(*(health.probe() for health in self.by_tier.values()))
