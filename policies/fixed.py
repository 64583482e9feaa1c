"""Policies that look at nothing: for pinning behaviour in tests, demonstrations and load runs."""

from __future__ import annotations

from typing import Literal

from policies.base import Judge, Policy
from policies.signals import Decision, Finish, RequestFacts, Token


class Always(Policy):
    """Escalates every request, as soon as the small model has begun to answer.

    Not before: only then does the small worker hold the prompt's KV, so that the hand-over is the real one.
    """

    method: Literal["always"] = "always"

    def begin(self) -> Judge:
        return _AlwaysJudge()


class Never(Policy):
    """Keeps every answer of the small model, from its first token on."""

    method: Literal["never"] = "never"

    def begin(self) -> Judge:
        return _NeverJudge()


class _AlwaysJudge(Judge):
    def score(self) -> float | None:
        return None

    def on_token(self, token: Token) -> Decision:
        return Decision.escalate("always")

    def on_finish(self, finish: Finish) -> Decision:
        return Decision.escalate("always")


class _NeverJudge(Judge):
    def score(self) -> float | None:
        return None

    def on_request(self, facts: RequestFacts) -> Decision:
        return Decision.keep("never")

    def on_finish(self, finish: Finish) -> Decision:
        return Decision.keep("never")
