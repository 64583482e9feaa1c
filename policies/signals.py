"""The nouns of escalation: what a judge is told, and what it answers.

A field that is None was not measured. That is never read as zero: each policy says what it answers then.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class TierState(NamedTuple):
    """What the router knows of one tier at this moment."""

    name: str
    healthy: bool
    in_flight: int  # requests that it answers now
    queued: int | None = None  # requests that wait for it


class RequestFacts(NamedTuple):
    """What is known of a request before the attempt that is to be judged."""

    characters: int | None  # of all message texts together; None: the prompt is token ids
    messages: int
    has_tools: bool
    wants_json: bool  # a `response_format` other than text
    text: str | None = None  # of the last user message
    prompt_tokens: int | None = None
    tool_names: tuple[str, ...] | None = None  # of the tools that are offered
    answer_limit: int | None = None  # the most tokens the answer can have
    tier: str = ""  # the tier that is asked; policies with a memory keep one for each tier
    tiers: tuple[TierState, ...] = ()  # in the order of escalation
    calls_used: int | None = None  # chat calls made for this request so far
    escalated_share: float | None = None  # of the recent requests, 0 to 1


class Token(NamedTuple):
    """One token of the answer. Log-probabilities are natural logarithms.

    `logprob` is None where the worker sent text without one. `top` holds the log-probabilities of the
    likeliest tokens at that position, in any order, as many as the policy asked for.
    """

    logprob: float | None
    top: tuple[float, ...] = ()
    text: str | None = None


class ToolCall(NamedTuple):
    """A call in a complete answer; `arguments` is the text as the model wrote it."""

    name: str
    arguments: str


class Finish(NamedTuple):
    """The end of a complete answer; `reason` is OpenAI's `finish_reason`."""

    reason: str
    text: str | None = None  # of the whole answer, without its reasoning
    tool_calls: tuple[ToolCall, ...] | None = None

    def says_nothing(self) -> bool:
        """True where the answer is known to hold neither text nor a tool call."""
        return self.text is not None and not self.text.strip() and not self.tool_calls


class SelfCheck(NamedTuple):
    """The small model's one-token reply to a policy's question about its own answer.

    `top` holds text and log-probability of the likeliest first tokens, in any order; empty where the call failed.
    """

    top: tuple[tuple[str, float], ...] = ()


class Verdict(Enum):
    WAIT = "wait"
    KEEP = "keep"
    ESCALATE = "escalate"


class Decision(NamedTuple):
    """A verdict and why. `reason` is one of a policy's fixed words: it becomes a header and a metric's label."""

    verdict: Verdict
    reason: str
    tier: str | None = None  # escalate: straight to this tier; None: to the next one
    shadow: bool = False  # keep: ask the next tier too, off the path, to measure agreement

    @classmethod
    def keep(cls, reason: str) -> Decision:
        return cls(Verdict.KEEP, reason)

    @classmethod
    def escalate(cls, reason: str, tier: str | None = None) -> Decision:
        return cls(Verdict.ESCALATE, reason, tier)


WAIT = Decision(Verdict.WAIT, "")
