"""What happened to one request: filled in on the way, read once at the end.

It becomes the response headers and the extension field `kvlift` of the answer. Neither holds prompt text, keys
or namespaces. Times are milliseconds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

_LEAST_SCORE = -9999.0  # OpenAI's stand-in for an impossible token; JSON has no infinity


@dataclass(slots=True)
class AttemptRecord:
    """One chat call to one worker."""

    tier: str
    served: str
    outcome: str = "running"  # then answered, discarded, failed or cancelled
    reason: str = ""
    confidence: float | None = None
    tokens_seen: int = 0  # counted by the router, for attempts that end before their usage comes
    text: str | None = None  # only where the client asked for it
    check: AttemptRecord | None = None  # the question to the worker about this answer, where the policy has one
    _usage: dict[str, Any] = field(default_factory=dict)
    _started: float = field(default_factory=time.perf_counter)
    _ttft_ms: float | None = None  # buffered answers have none
    _total_ms: float | None = None

    def first_token(self) -> None:
        self._ttft_ms = self._elapsed_ms()

    def set_usage(self, usage: dict[str, Any]) -> None:
        self._usage = usage

    def decided(self, outcome: str, reason: str) -> None:
        self.outcome, self.reason = outcome, reason
        self.end()

    def end(self) -> None:
        """Takes the total time; for an answer that goes on after its decision, once more at its end."""
        self._total_ms = self._elapsed_ms()

    def as_json(self) -> dict[str, Any]:
        usage = self._usage
        tokens = {
            "prompt": self.prompt_tokens,
            "completion": usage.get("completion_tokens", self.tokens_seen),
            "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        }
        fields: dict[str, Any] = {
            "tier": self.tier,
            "served": self.served,
            "outcome": self.outcome,
            "reason": self.reason,
            "confidence": self.confidence if self.confidence is None else max(self.confidence, _LEAST_SCORE),
            "tokens": tokens,
            "ms": {"ttft": _rounded(self._ttft_ms), "total": _rounded(self._total_ms)},
        }
        if self.text is not None:
            fields["text"] = self.text
        if self.check is not None:
            fields["check"] = self.check.as_json()
        return fields

    @property
    def prompt_tokens(self) -> int | None:
        """As the worker counted them; None before it has told."""
        tokens = self._usage.get("prompt_tokens")
        return tokens if type(tokens) is int else None

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000


@dataclass(slots=True)
class LiftRecord:
    """One hand-over. `report` holds what the worker measured: tokens, rho, bytes and ms per phase."""

    status: str
    reason: str | None
    report: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {"status": self.status, "reason": self.reason, **self.report}


@dataclass(slots=True)
class Record:
    """One client request."""

    attempts: list[AttemptRecord] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # tiers that were passed over, and why
    notes: list[str] = field(default_factory=list)  # what was not done as a policy asked
    lift: LiftRecord | None = None
    tier: str = ""
    escalated: bool = False
    reason: str = ""

    def begin(self, tier: str, served: str) -> AttemptRecord:
        attempt = AttemptRecord(tier, served)
        self.attempts.append(attempt)
        self.tier = tier
        return attempt

    def escalate(self, reason: str) -> None:
        """The last tier did not answer, for `reason`; a later one is asked."""
        self.escalated, self.reason = True, reason

    def skip(self, tier: str, reason: str) -> None:
        self.skipped.append({"tier": tier, "reason": reason})

    @property
    def prompt_tokens(self) -> int | None:
        """As the first tier that told counted them: tiers that can lift share their tokenizer."""
        return next((n for attempt in self.attempts if (n := attempt.prompt_tokens) is not None), None)

    def headers(self) -> dict[str, str]:
        return {
            "x-kvlift-tier": self.tier,
            "x-kvlift-escalated": "true" if self.escalated else "false",
            "x-kvlift-reason": self.reason,
            "x-kvlift-lift": self.lift.status if self.lift else "none",
        }

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "escalated": self.escalated,
            "reason": self.reason,
            "attempts": [attempt.as_json() for attempt in self.attempts],
            "skipped": self.skipped,
            "notes": self.notes,
            "lift": self.lift.as_json() if self.lift else None,
        }


def _rounded(value: float | None) -> float | None:
    return value if value is None else round(value, 3)
