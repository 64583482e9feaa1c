"""`/metrics` for Prometheus and `/status` for the page, behind the clients' keys where there are any."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from router.gateway import Gateway


def routes(gateway: Gateway) -> APIRouter:
    """The routes of one gateway."""
    router = APIRouter()

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Metrics in Prometheus's text format."""
        return Response(gateway.observer.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """How things stand, and the last decisions for the tenant that asks."""
        config, now = gateway.config, gateway.readiness()
        decisions = gateway.observer.decisions
        return {
            "ready": now["ready"],
            "draining": now["draining"],
            "in_flight": now["in_flight"],
            "queued": now["waiting"],
            "totals": decisions.totals(),
            "tiers": [
                {"name": tier.name, "served": tier.served, "workers": now["tiers"][tier.name]["workers"]}
                for tier in config.tiers
            ],
            "policies": [
                {"name": name, "method": policy.method, "default": name == config.default_policy}
                for name, policy in config.policies.items()
            ],
            "decisions": decisions.of(gateway.access.tenant(request.headers).name),
        }

    return router
