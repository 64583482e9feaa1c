"""The router's parts, put together for one config, and their lifetime."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

from router.cascade import Cascade
from router.config import Config
from router.errors import Unavailable
from router.health import Monitor
from router.reply import Reply
from router.request import ChatRequest
from router.routes import Routes
from router.shadow import Shadows
from router.traffic import Counters, InFlight
from router.worker import Worker


class Gateway:
    """An async context manager: workers are probed inside it, and connections closed at its end."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where a tier's address or key is not known."""
        self.config = config
        self.routes = Routes(config)
        self._workers = {tier.name: Worker(tier, config.limits) for tier in config.tiers}
        self.monitor = Monitor(self._workers.values(), config.health)
        self.counters = Counters()
        self._shadows = Shadows(self._workers, self.monitor, config.limits, self.counters)
        self._cascade = Cascade(config, self._workers, self.monitor, self._shadows, self.counters)
        self._in_flight = InFlight()
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
        for worker in self._workers.values():
            await worker.aclose()

    def drain(self) -> None:
        """From now on requests are refused; those in flight go on."""
        self._draining = True

    @property
    def idle(self) -> bool:
        return self._in_flight.count == 0

    def chat(self, raw: bytes) -> Response:
        """The reply to a chat request; it runs when it is sent. Raises `ApiError`."""
        if self._draining:
            raise Unavailable("the router is shutting down; ask another one", code="draining")
        request = ChatRequest.parse(raw)
        route = self.routes.find(request.model, request.options)
        if route.policy is not None:
            request.refuse_choices(list(self.routes.tiers))
        return Reply(self._cascade, request, route, self._in_flight)

    def readiness(self) -> dict[str, Any]:
        """`ready` holds when every worker is up and the router takes requests."""
        return {
            "ready": self.monitor.all_up() and not self._draining,
            "draining": self._draining,
            "in_flight": self._in_flight.count,
            "counters": self.counters.as_json(),
            "tiers": {tier: health.as_json() for tier, health in self.monitor.by_tier.items()},
        }
