"""How many requests are served at once, and which come next.

First come, first served. What would make the queue too long, or has waited too long in it, is refused with a 429
and a time to come back. A client that hangs up leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from router.access import Tenant
from router.config import Limits
from router.errors import Busy
from router.traffic import InFlight

_COME_BACK_S = 1.0


class Admission:
    """The requests that are here: those in flight, and those that wait."""

    def __init__(self, limits: Limits) -> None:
        self.in_flight = InFlight()
        self.waiting = InFlight()
        self._limits = limits
        self._free = asyncio.Semaphore(limits.max_in_flight)
        self._by_tenant: Counter[str] = Counter()

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return self.in_flight.count == 0 and self.waiting.count == 0

    def check(self, tenant: Tenant) -> None:
        """Raises `Busy` where a request of the tenant would be refused at once. Holds no place."""
        here = self._by_tenant[tenant.name]
        if tenant.max_in_flight is not None and here >= tenant.max_in_flight:
            raise Busy(
                f"{here} requests of tenant {tenant.name!r} are here, its max_in_flight",
                code="tenant_busy",
                retry_after_s=_COME_BACK_S,
            )
        if self._free.locked() and self.waiting.count >= self._limits.max_queue:
            raise Busy(
                f"limits.max_in_flight, {self._limits.max_in_flight}, requests are being served and limits.max_queue, "
                f"{self._limits.max_queue}, wait",
                code="queue_full",
                retry_after_s=_COME_BACK_S,
            )

    @asynccontextmanager
    async def enter(self, tenant: Tenant) -> AsyncIterator[None]:
        """A place for one request, once there is one. Raises `Busy`."""
        self.check(tenant)
        self._by_tenant[tenant.name] += 1
        try:
            await self._wait()
            try:
                with self.in_flight:
                    yield
            finally:
                self._free.release()
        finally:
            self._by_tenant[tenant.name] -= 1

    async def _wait(self) -> None:
        try:
            with self.waiting:
                async with asyncio.timeout(self._limits.queue_s):
                    await self._free.acquire()
        except TimeoutError as error:
            raise Busy(
                f"waited limits.queue_s, {self._limits.queue_s:g} s, for one of limits.max_in_flight, "
                f"{self._limits.max_in_flight}, places",
                code="queue_timeout",
                retry_after_s=_COME_BACK_S,
            ) from error
