"""The router's parts, put together for one config, and their lifetime."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.responses import Response

from router.access import Access, Tenant
from router.admission import Admission
from router.cascade import Cascade
from router.config import Config
from router.errors import Unavailable
from router.fleet import make_fleets, make_workers
from router.health import Monitor
from router.hints import Hints
from router.record import Record
from router.reply import Reply
from router.request import Request
from router.routes import Routes
from router.shadow import Shadows
from router.telemetry.observer import Observer
from router.traffic import Counters


class Gateway:
    """An async context manager: workers are probed inside it, and connections closed at its end."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where the address or key of a worker, or the key of a client, is not known."""
        self.config = config
        self.access = Access(config.auth)
        self.admission = Admission(config.limits)
        self.routes = Routes(config)
        self.workers = make_workers(config)
        self.monitor = Monitor(self.workers, config.health)
        self.fleets = make_fleets(config, self.monitor)
        self.counters = Counters()
        self.observer = Observer(config.telemetry, self.readiness)
        self._shadows = Shadows(self.fleets, config.limits, self.counters, self.observer.metrics.attempted)
        self._cascade = Cascade(config, self.fleets, self.monitor, self._shadows, self.counters)
        self._draining = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Gateway:
        await self.monitor.probe_all()
        self._watch = asyncio.create_task(self.monitor.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.gather(self._watch, return_exceptions=True)
        await self._shadows.aclose()
        for worker in self.workers:
            await worker.aclose()
        await self.observer.aclose()

    def drain(self) -> None:
        """From now on requests are refused; those in flight go on."""
        self._draining = True

    @property
    def idle(self) -> bool:
        return self.admission.idle

    def admit(self, headers: Mapping[str, str]) -> Tenant:
        """Whose request this is, before its body is read. Raises `ApiError` where none would be taken now."""
        tenant = self.access.tenant(headers)
        if self._draining:
            raise Unavailable("the router is shutting down; ask another one", code="draining")
        self.admission.check(tenant)
        return tenant

    def reply(self, kind: type[Request], raw: bytes, tenant: Tenant, headers: Mapping[str, str]) -> Response:
        """The reply to a request; it waits for its place and runs when it is sent. Raises `ApiError`."""
        request = kind.parse(raw, Hints.read(headers))
        request = replace(request, body=tenant.salted(request.body))
        route = self.routes.find(request.model, request.options)
        if route.policy is not None:
            request.refuse_choices(list(self.routes.tiers))
        record = Record(route.name, route.policy is None, tenant.name, hinted=request.hints is not None)
        return Reply(self._cascade, request, route, record, partial(self.admission.enter, tenant), self.observer)

    def readiness(self) -> dict[str, Any]:
        """`ready` holds when every tier has a worker that is up, and the router takes requests."""
        return {
            "ready": all(fleet.up for fleet in self.fleets.values()) and not self._draining,
            "draining": self._draining,
            "in_flight": self.admission.in_flight.count,
            "waiting": self.admission.waiting.count,
            "counters": self.counters.as_json(),
            "tiers": {tier: fleet.as_json() for tier, fleet in self.fleets.items()},
        }
