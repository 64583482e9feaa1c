"""What happened to one request: filled in on the way, read once at the end.

It becomes the response headers and the extension field `kvlift` of the answer. Neither holds prompt text, keys
or namespaces. Times are milliseconds.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Literal

from router.hints import STATUS_HEADER, transfer_status

Path = Literal["pinned", "kept", "native", "lifted", "sticky"]
"""Asked by name; kept by the policy; escalated, with a native prefill, with lifted KV, or in an earlier turn."""

_LEAST_SCORE = -9999.0  # OpenAI's stand-in for an impossible token; JSON has no infinity


@dataclass(slots=True)
class AttemptRecord:
    """One chat call to one worker."""

    tier: str
    served: str
    worker: str = ""  # the one of the tier's workers that was asked last
    outcome: str = "running"  # then answered, continued (by the next tier), discarded, failed or cancelled
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
        tokens = {
            "prompt": self.prompt_tokens,
            "completion": self.completion_tokens,
            "cached": self.cached_tokens,
        }
        fields: dict[str, Any] = {
            "tier": self.tier,
            "served": self.served,
            "worker": self.worker,
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

    @property
    def completion_tokens(self) -> int:
        """As the worker counted them, or as they were seen to come."""
        tokens = self._usage.get("completion_tokens")
        return tokens if type(tokens) is int else self.tokens_seen

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, as the worker tells; None where it does not."""
        tokens = (self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return tokens if type(tokens) is int else None

    @property
    def ttft_ms(self) -> float | None:
        """From the call to the first content; None for buffered answers."""
        return self._ttft_ms

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
    """One client request. `route` names its policy, or the tier that it is pinned to."""

    route: str = ""
    pinned: bool = False
    tenant: str = ""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    outcome: str = "running"  # then answered, refused (by the router or for the client's fault), failed or cancelled
    attempts: list[AttemptRecord] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # tiers that were passed over, and why
    notes: list[str] = field(default_factory=list)  # what was not done as a policy asked
    lift: LiftRecord | None = None
    tier: str = ""
    escalated: bool = False
    sticky: bool = False  # it went straight to the tier that its conversation had been escalated to
    hinted: bool = False  # it came with hints of where its KV is
    hints_followed: bool = False
    reason: str = ""
    escalations: list[str] = field(default_factory=list)  # why, for each step from a tier to a later one
    ttft_ms: float | None = None  # until the client is sent the first content; buffered answers have none
    total_ms: float = 0.0
    _started: float = field(default_factory=time.perf_counter)

    def begin(self, tier: str, served: str) -> AttemptRecord:
        attempt = AttemptRecord(tier, served)
        self.attempts.append(attempt)
        self.tier = tier
        return attempt

    def escalate(self, reason: str) -> None:
        """The last tier did not answer, for `reason`; a later one is asked."""
        self.escalated, self.reason = True, reason
        self.escalations.append(reason)

    def stick(self) -> None:
        """The tier of the conversation's last answer is asked first."""
        self.escalate("sticky")
        self.sticky = True

    def follow_hints(self, escalates: bool) -> None:
        """The tier that the hints lead to is asked first; `escalates`: in place of an earlier one."""
        self.hints_followed = True
        if escalates:
            self.escalate("kv_hint")

    def restart(self, why: str) -> None:
        """The next tier answers anew, though it was to go on: what was said before is discarded after all."""
        self.notes.append(f"escalation: restart in place of continue: {why}")
        for attempt in self.attempts:
            if attempt.outcome == "continued":
                attempt.outcome = "discarded"

    def skip(self, tier: str, reason: str) -> None:
        self.skipped.append({"tier": tier, "reason": reason})

    def show(self) -> None:
        """The client is about to be sent the first content."""
        self.ttft_ms = self._elapsed_ms()

    def end(self, outcome: str) -> None:
        """The request is over; only the first word counts."""
        if self.outcome == "running":
            self.outcome, self.total_ms = outcome, self._elapsed_ms()

    @property
    def path(self) -> Path:
        """How the tier that answers came to it."""
        if self.lift is not None and self.lift.status == "applied":
            return "lifted"
        if self.pinned:
            return "pinned"
        if self.sticky:
            return "sticky"
        return "native" if self.escalated else "kept"

    @property
    def prompt_tokens(self) -> int | None:
        """As the first tier that told counted them: tiers that can lift share their tokenizer."""
        return next((n for attempt in self.attempts if (n := attempt.prompt_tokens) is not None), None)

    def headers(self) -> dict[str, str]:
        lift = self.lift.status if self.lift else None
        told = {
            "x-kvlift-tier": self.tier,
            "x-kvlift-escalated": "true" if self.escalated else "false",
            "x-kvlift-reason": self.reason,
            "x-kvlift-lift": lift or "none",
            "x-request-id": self.id,
        }
        if not self.hinted:
            return told
        return {**told, STATUS_HEADER: transfer_status(lift if self.hints_followed else None)}

    def as_json(self) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "escalated": self.escalated,
            "sticky": self.sticky,
            "reason": self.reason,
            "attempts": [attempt.as_json() for attempt in self.attempts],
            "skipped": self.skipped,
            "notes": self.notes,
            "lift": self.lift.as_json() if self.lift else None,
        }

    def _elapsed_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1000


def _rounded(value: float | None) -> float | None:
    return value if value is None else round(value, 3)
