"""Gauges: how things stand, read off the gateway at the moment of asking, so that they cannot drift from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class Standing(Collector):
    """`readiness` is `Gateway.readiness`."""

    def __init__(self, readiness: Callable[[], dict[str, Any]]) -> None:
        self._readiness = readiness

    def describe(self) -> list[Metric]:
        """Nothing: the registry would ask a gateway that does not stand yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        now = self._readiness()
        yield GaugeMetricFamily("kvlift_ready", "Whether every tier has a worker and requests are taken.", now["ready"])
        yield GaugeMetricFamily("kvlift_in_flight", "Requests that are being served.", now["in_flight"])
        yield GaugeMetricFamily("kvlift_queued", "Requests that wait to be served.", now["waiting"])
        yield from _workers(now["tiers"])
        counted = now["counters"]
        yield CounterMetricFamily(
            "kvlift_self_checks_failed", "Questions about an answer that were asked in vain.", counted["checks_failed"]
        )
        shadows = CounterMetricFamily("kvlift_shadows", "Shadow calls, by how they ended.", labels=["outcome"])
        for outcome, n in counted["shadow"].items():
            shadows.add_metric([outcome], n)
        yield shadows


def _workers(tiers: dict[str, Any]) -> Iterator[Metric]:
    up, in_flight, queued, breaker, lifts = (
        GaugeMetricFamily(f"kvlift_worker_{name}", text, labels=["tier", "worker"])
        for name, text in (
            ("up", "Whether the worker answers its probes."),
            ("in_flight", "Chat calls that are open to the worker."),
            ("queued", "Requests that wait inside the worker, at the last probe that told."),
            ("breaker_open", "Whether the worker gets only a trial call now and then."),
            ("lifts", "Whether the worker has told that it can take part in lifts."),
        )
    )
    for tier, told in tiers.items():
        for worker in told["workers"]:
            by = [tier, worker["name"]]
            up.add_metric(by, worker["up"])
            in_flight.add_metric(by, worker["in_flight"])
            breaker.add_metric(by, worker["breaker"] != "closed")
            lifts.add_metric(by, worker["lifts"])
            if worker["queued"] is not None:
                queued.add_metric(by, worker["queued"])
    yield from (up, in_flight, queued, breaker, lifts)
