"""The last requests and the totals since the start, for the page. No prompt text, no keys, and bounded."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from router.record import Record


@dataclass(slots=True)
class Totals:
    """Requests since the start. The names are the keys at `/status`."""

    requests: int = 0
    escalated: int = 0
    lifted: int = 0
    failed: int = 0
    cancelled: int = 0


class Decisions:
    """The latest first."""

    def __init__(self, size: int) -> None:
        self._totals = Totals()
        self._last: deque[tuple[str, dict[str, Any]]] = deque(maxlen=size)  # each with its tenant

    def add(self, record: Record) -> None:
        """A request has ended."""
        totals = self._totals
        totals.requests += 1
        totals.escalated += record.escalated
        totals.lifted += record.path == "lifted"
        totals.failed += record.outcome == "failed"
        totals.cancelled += record.outcome == "cancelled"
        self._last.appendleft((record.tenant, summary(record)))

    def totals(self) -> dict[str, int]:
        return asdict(self._totals)

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """Those of one tenant: what others ask is not its business."""
        return [made for owner, made in self._last if owner == tenant]


def summary(record: Record) -> dict[str, Any]:
    """One ended request in a few words and numbers."""
    return {
        "at": time.time(),
        "request_id": record.id,
        "policy": record.route,
        "tier": record.tier,
        "path": record.path,
        "outcome": record.outcome,
        "reason": record.reason,
        "lift": record.lift.status if record.lift else None,
        "ms": {"ttft": record.ttft_ms, "total": record.total_ms},
    }
