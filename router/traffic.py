"""What the router counts of its own traffic: what runs now, what was decided lately, what was passed over."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

_RECENT = 200  # requests: enough for a share in steps of half a percent, few enough to follow the traffic


class InFlight:
    """Counts what is being served; a context manager for each."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class Recent:
    """Which of the last requests that a policy judged have left their first tier. Failed ones are not among them."""

    def __init__(self, size: int = _RECENT) -> None:
        self._escalated: deque[bool] = deque(maxlen=size)

    def add(self, escalated: bool) -> None:
        self._escalated.append(escalated)

    def escalated_share(self) -> float:
        """From 0 to 1. Before the first request 0, so that a budget has its whole share to give."""
        return sum(self._escalated) / len(self._escalated) if self._escalated else 0.0


Shadow = Literal["agreed", "disagreed", "failed", "cancelled", "dropped"]
"""How a shadow call ended. `cancelled`: by the end of the router; `dropped`: not asked, for too many ran already or the
tier was down."""


@dataclass(slots=True)
class Counters:
    """Totals since the router's start. The names are the keys under `counters` at `/ready`."""

    checks_failed: int = 0  # questions about an answer that were asked in vain, or not asked for want of calls
    shadow: dict[Shadow, int] = field(default_factory=lambda: dict.fromkeys(get_args(Shadow), 0))

    def as_json(self) -> dict[str, object]:
        return asdict(self)
