"""The nouns of escalation: what a judge is told, and what it answers."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class RequestFacts(NamedTuple):
    """What is known of a request before any model has seen it."""

    characters: int  # of all message texts together
    messages: int
    has_tools: bool
    wants_json: bool  # a `response_format` other than text


class Token(NamedTuple):
    """One token of the answer. Log-probabilities are natural logarithms.

    `logprob` is None where the worker sent text without one. `top` holds the log-probabilities of the
    likeliest tokens at that position, in any order, as many as the policy asked for.
    """

    logprob: float | None
    top: tuple[float, ...] = ()


class Finish(NamedTuple):
    """The end of a complete answer; `reason` is OpenAI's `finish_reason`."""

    reason: str


class Verdict(Enum):
    WAIT = "wait"
    KEEP = "keep"
    ESCALATE = "escalate"


class Decision(NamedTuple):
    """A verdict and why. `reason` is one of a policy's fixed words: it becomes a header and a metric's label."""

    verdict: Verdict
    reason: str

    @classmethod
    def keep(cls, reason: str) -> Decision:
        return cls(Verdict.KEEP, reason)

    @classmethod
    def escalate(cls, reason: str) -> Decision:
        return cls(Verdict.ESCALATE, reason)


WAIT = Decision(Verdict.WAIT, "")
