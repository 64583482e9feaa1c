"""The contract between a policy and whoever runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import BaseModel, ConfigDict

from policies.signals import WAIT, Decision, Finish, RequestFacts, Token


class Judge(ABC):
    """Follows one request. Not reusable, not shared."""

    @abstractmethod
    def score(self) -> float | None:
        """The confidence so far, higher is surer; None where nothing was measured. Changes nothing."""

    def on_request(self, facts: RequestFacts) -> Decision:
        """Before the attempt. `escalate` here means that the small model is not asked at all."""
        return WAIT

    def on_token(self, token: Token) -> Decision:
        """A token of the answer. Tokens may come in chunks of any size: only their order counts."""
        return WAIT

    @abstractmethod
    def on_finish(self, finish: Finish) -> Decision:
        """The answer is complete. Never `wait`."""


class Policy(BaseModel, ABC):
    """A policy's parameters; makes one judge per request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def top_logprobs(self) -> int | None:
        """Alternatives per token that the judge reads; 0: the token's own only; None: no log-probabilities."""
        return None

    @abstractmethod
    def begin(self) -> Judge:
        """A fresh judge for one request."""
