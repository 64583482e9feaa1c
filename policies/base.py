"""The contract between a policy and whoever runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from pydantic import BaseModel, ConfigDict

from policies.signals import WAIT, Decision, Finish, RequestFacts, SelfCheck, Token


class Judge(ABC):
    """Follows one request. Not reusable, not shared."""

    def score(self) -> float | None:
        """The confidence so far, higher is surer; None where nothing was measured. Changes nothing."""
        return None

    def on_request(self, facts: RequestFacts) -> Decision:
        """Before the attempt. `escalate` here means that the small model is not asked at all."""
        return WAIT

    def on_token(self, token: Token) -> Decision:
        """A token of the answer. Tokens may come in chunks of any size: only their order counts."""
        return WAIT

    @abstractmethod
    def on_finish(self, finish: Finish) -> Decision:
        """The answer is complete. `wait` only where the policy has a `question`: then `on_check` decides."""

    def on_check(self, check: SelfCheck) -> Decision:
        """The reply to the policy's question, after `on_finish` has answered `wait`. Never `wait`."""
        raise NotImplementedError(f"{type(self).__name__} asks no question")


class Policy(BaseModel, ABC):
    """A policy's parameters; makes one judge per request."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def top_logprobs(self) -> int | None:
        """Alternatives per token that the judge reads; 0: the token's own only; None: no log-probabilities."""
        return None

    @property
    def question(self) -> str | None:
        """What the small model is asked about its own answer, as a last user turn; None: nothing."""
        return None

    @property
    def question_logprobs(self) -> int:
        """Alternatives of the reply's first token that the judge reads; 0 without a question."""
        return 0

    @property
    def tiers(self) -> frozenset[str]:
        """The tiers that the policy names; the config must have them."""
        return frozenset()

    @abstractmethod
    def begin(self) -> Judge:
        """A fresh judge for one request."""
