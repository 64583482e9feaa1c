"""Which workers are up, and what they can do.

Each worker is probed on its own, so that a slow or failing probe holds up no other. Several misses in a row mark
a worker down, and so many hits mark it up again. Requests have no say here: what they meet is the breaker's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

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
        self._hits = 0
        self._was_up = False
        self._last_error = "not probed yet"
        self._lift_error = worker.why_no_lift

    async def probe(self) -> None:
        """One probe. Raises nothing: what fails is a miss."""
        try:
            await self.worker.healthy(self._config.timeout_s)
        except Exception as error:  # whatever a probe meets, the watch goes on
            self._miss(error)
            return
        self._hit()
        if self.up:
            if self.capabilities is None and self.worker.why_no_lift is None:
                await self._learn()
            self.queued = await self._ask_queued()

    def _miss(self, error: Exception) -> None:
        self._misses, self._hits = self._misses + 1, 0
        self._last_error = str(error) or repr(error)
        if self.up and self._misses >= self._config.misses:
            self.up = False
            self.queued = None
            self.capabilities = None  # what comes back may be another process with other packs
            log.warning("worker down: worker=%s misses=%d error=%s", self.worker.name, self._misses, self._last_error)

    def _hit(self) -> None:
        self._misses, self._hits = 0, self._hits + 1
        self._last_error = ""
        if not self.up and (self._hits >= self._config.hits or not self._was_up):
            self.up = self._was_up = True
            self.worker.breaker.reset()
            log.info("worker up: worker=%s address=%s", self.worker.name, self.worker.address)

    async def watch(self) -> None:
        """Probes for ever."""
        while True:
            await asyncio.sleep(self._config.interval_s)
            await self.probe()

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.worker.name,
            "up": self.up,
            "breaker": self.worker.breaker.state,
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
                log.warning("worker without lift: worker=%s reason=%s", self.worker.name, reason)
            self._lift_error = reason


class Monitor:
    """The health of all workers, by the worker's name."""

    def __init__(self, workers: Iterable[Worker], config: Health) -> None:
        self.by_worker = {worker.name: WorkerHealth(worker, config) for worker in workers}

    def __getitem__(self, worker: str) -> WorkerHealth:
        return self.by_worker[worker]

    def all_up(self) -> bool:
        return all(health.up for health in self.by_worker.values())

    async def run(self) -> None:
        """Probes every worker until cancelled."""
        async with asyncio.TaskGroup() as group:
            for health in self.by_worker.values():
                group.create_task(health.watch())

    async def probe_all(self) -> None:
        await asyncio.gather(*(health.probe() for health in self.by_worker.values()))
