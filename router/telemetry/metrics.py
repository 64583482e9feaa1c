"""Counters and histograms, for Prometheus. All are read off a request's `Record`, at its end, here.

Seconds and bytes, as Prometheus has it. Labels are names of the config and words of labels.py.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.registry import Collector

from router.record import AttemptRecord, LiftRecord, Record
from router.telemetry import labels

NOBODY = "none"
"""The tier and path of a request that no tier was asked for."""

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
_SPENT = {"answered": "completion", "continued": "continued", "agreed": "shadow", "disagreed": "shadow"}
"""What became of an attempt's tokens, by its outcome; those of all others were discarded."""


class Metrics:
    """The metrics of one router. `standing` is asked for gauges each time."""

    def __init__(self, standing: Collector) -> None:
        registry = self._registry = CollectorRegistry()
        registry.register(standing)

        def counter(name: str, text: str, *by: str) -> Counter:
            return Counter(name, text, by, registry=registry)

        def histogram(name: str, text: str, *by: str) -> Histogram:
            return Histogram(name, text, by, registry=registry, buckets=_SECONDS)

        self._requests = counter(
            "kvlift_requests", "Requests that were taken, by how they ended.", "policy", "tier", "path", "outcome"
        )
        self._errors = counter(
            "kvlift_errors", "Requests that ended in an error, those that were not taken included, by its code.", "code"
        )
        self._ttft = histogram(
            "kvlift_ttft_seconds",
            "Streamed answers: from the request to the first content that the client is sent.",
            "tier", "model", "path",
        )  # fmt: skip
        self._duration = histogram(
            "kvlift_request_seconds", "Answers: from the request to their end.", "tier", "model", "path"
        )
        self._attempts = counter(
            "kvlift_attempts", "Chat calls to workers, questions about an answer included.", "tier", "outcome", "reason"
        )
        self._escalations = counter(
            "kvlift_escalations", "Steps from one tier to a later one, and why.", "policy", "reason"
        )
        self._lifts = counter("kvlift_lifts", "Hand-overs of KV that were tried.", "tier", "status")
        self._lift = histogram("kvlift_lift_seconds", "Applied lifts, as the target measured them.", "tier")
        self._phases = counter("kvlift_lift_phase_seconds", "Time of applied lifts, by phase.", "tier", "phase")
        self._bytes = counter("kvlift_lift_bytes", "KV that was moved between workers.", "tier")
        self._tokens = counter(
            "kvlift_tokens",
            "Prompt tokens of all chat calls, cached ones among them; tokens of answers by what became of them: "
            "completion, continued by a later tier, shadow, discarded; positions of lifts: reused (they were there), "
            "mapped (they came), recomputed (of these).",
            "tier", "kind",
        )  # fmt: skip

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self._registry)

    def failed(self, code: str) -> None:
        """A request has ended in an error."""
        self._errors.labels(labels.reason(code)).inc()

    def observe(self, record: Record) -> None:
        """A request has ended."""
        tier, path = (record.tier, record.path) if record.tier else (NOBODY, NOBODY)
        self._requests.labels(record.route, tier, path, record.outcome).inc()
        for reason in record.escalations:
            self._escalations.labels(record.route, labels.reason(reason)).inc()
        for attempt in record.attempts:
            self.attempted(attempt)
        if record.lift is not None:
            self._observe_lift(tier, record.lift)
        if record.outcome in ("failed", "refused"):
            self.failed(record.reason)
        if record.outcome != "answered":
            return
        model = record.attempts[-1].served
        self._duration.labels(tier, model, path).observe(record.total_ms / 1e3)
        if record.ttft_ms is not None:
            self._ttft.labels(tier, model, path).observe(record.ttft_ms / 1e3)

    def attempted(self, attempt: AttemptRecord) -> None:
        """A chat call has ended."""
        self._attempts.labels(attempt.tier, attempt.outcome, labels.reason(attempt.reason)).inc()
        spent = _SPENT.get(attempt.outcome, "discarded")
        for kind, n in (
            ("prompt", attempt.prompt_tokens), ("cached", attempt.cached_tokens), (spent, attempt.completion_tokens)
        ):  # fmt: skip
            self._tokens.labels(attempt.tier, kind).inc(n or 0)
        if attempt.check is not None:
            self.attempted(attempt.check)

    def _observe_lift(self, tier: str, lift: LiftRecord) -> None:
        self._lifts.labels(tier, lift.status).inc()
        if lift.status != "applied":
            return
        report = lift.report
        for kind, key in (("reused", "prefix"), ("mapped", "lifted"), ("recomputed", "recomputed")):
            self._tokens.labels(tier, kind).inc(report["tokens"].get(key, 0))
        self._bytes.labels(tier).inc(report["bytes"])
        times = dict(report["ms"])
        if (total := times.pop("total", None)) is not None:
            self._lift.labels(tier).observe(total / 1e3)
        for name, ms in times.items():
            self._phases.labels(tier, labels.phase(name)).inc(ms / 1e3)
