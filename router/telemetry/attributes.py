"""What a span says of a request, of an attempt and of a lift: names of the config, the router's own words, numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from router.record import AttemptRecord, LiftRecord, Record

_BAD = frozenset({"failed", "refused"})


def describe_request(span: Span, record: Record) -> None:
    """At its end."""
    _set(span, {
        "kvlift.request_id": record.id,
        "kvlift.policy": record.route,
        "kvlift.tier": record.tier,
        "kvlift.path": record.path,
        "kvlift.outcome": record.outcome,
        "kvlift.reason": record.reason,
        "kvlift.escalations": ",".join(record.escalations),
        "kvlift.skipped": ",".join(skipped["tier"] for skipped in record.skipped),
        "kvlift.ttft_ms": record.ttft_ms,
    })  # fmt: skip
    _mark(span, record.outcome, record.reason)


def describe_attempt(span: Span, record: AttemptRecord) -> None:
    """At its end: what the policy decided on it, and why."""
    _set(span, {
        "kvlift.tier": record.tier,
        "kvlift.worker": record.worker,
        "kvlift.outcome": record.outcome,
        "kvlift.reason": record.reason,
        "kvlift.confidence": record.confidence,
        "kvlift.ttft_ms": record.ttft_ms,
        "gen_ai.request.model": record.served,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.completion_tokens,
        "kvlift.cached_tokens": record.cached_tokens,
    })  # fmt: skip
    _mark(span, record.outcome, record.reason)


def describe_lift(span: Span, record: LiftRecord) -> None:
    """The reason is cut before its first colon: what follows may be a worker's own words."""
    report = record.report
    _set(span, {
        "kvlift.status": record.status,
        "kvlift.reason": (record.reason or "").partition(":")[0],
        "kvlift.selector": report.get("selector"),
        "kvlift.rho": report.get("chosen_rho"),
        "kvlift.bytes": report.get("bytes"),
        **{f"kvlift.tokens.{name}": n for name, n in report.get("tokens", {}).items()},
        **{f"kvlift.ms.{name}": ms for name, ms in report.get("ms", {}).items()},
    })  # fmt: skip


def _set(span: Span, attributes: Mapping[str, Any]) -> None:
    span.set_attributes({key: value for key, value in attributes.items() if value not in (None, "")})


def _mark(span: Span, outcome: str, reason: str) -> None:
    if outcome in _BAD:
        span.set_status(Status(StatusCode.ERROR, reason))
