"""Policies that read the small model's token log-probabilities.

All share one shape: a statistic of the tokens seen so far (`policies.measures`), and a threshold under which the
request escalates, at the latest when the answer is complete. Earlier, where the rest of the answer cannot change
that: the bound of the statistic has fallen under the threshold. For a mean this needs `RequestFacts.answer_limit`.

Words they may answer with: `confident`, `low_confidence`, `empty_answer` (no token at all), `no_logprobs` (a token
came without what the policy reads: an unmeasured answer is not a confident one).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

from pydantic import Field

from policies.base import Judge, Policy
from policies.fields import Weight
from policies.measures import (
    Part,
    Statistic,
    Unmeasured,
    WeightedMean,
    WorstWindow,
    mean_certainty,
    mean_gap,
    mean_logprob,
)
from policies.signals import WAIT, Decision, Finish, RequestFacts, Token


class Confidence(Policy):
    """A statistic and the threshold under which an answer escalates. A higher threshold never escalates less."""

    threshold: float = Field(allow_inf_nan=False)

    @abstractmethod
    def statistic(self) -> Statistic:
        """A fresh one, for one answer."""

    def begin(self) -> Judge:
        return _ThresholdJudge(self.threshold, self.statistic())


class AvgLogprob(Confidence):
    """Escalates an answer whose mean token log-probability (nats, at most 0) is under `threshold`.

    The default, -0.2, is a geometric mean token probability of 0.82.
    """

    method: Literal["avg_logprob"] = "avg_logprob"
    threshold: float = Field(default=-0.2, le=0, allow_inf_nan=False)

    @property
    def top_logprobs(self) -> int | None:
        return 0

    def statistic(self) -> Statistic:
        return mean_logprob()


class Margin(Confidence):
    """Escalates an answer whose mean gap (nats, at least 0) between the two likeliest tokens is under `threshold`.

    The default, 1.0: on average the first choice is e times as likely as the second.
    """

    method: Literal["margin"] = "margin"
    threshold: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @property
    def top_logprobs(self) -> int | None:
        return 2

    def statistic(self) -> Statistic:
        return mean_gap()


class Entropy(Confidence):
    """Escalates an answer whose mean certainty, 1 - H / log k, is under `threshold` (0 to 1).

    H is the entropy of the `alternatives` likeliest tokens, renormalised to sum to 1; k is their number. Defaults:
    5 alternatives, 0.8, which two equally likely tokens (0.57) do not reach.
    """

    method: Literal["entropy"] = "entropy"
    threshold: float = Field(default=0.8, ge=0, le=1)
    alternatives: int = Field(default=5, ge=2, le=20)

    @property
    def top_logprobs(self) -> int | None:
        return self.alternatives

    def statistic(self) -> Statistic:
        return mean_certainty(self.alternatives)


class MinWindow(Confidence):
    """Escalates as soon as any `window` tokens in a row have a mean log-probability under `threshold`.

    An answer shorter than the window is judged by its own mean. Defaults: 8 tokens, -0.7 nats (probability 0.5).
    As one part of `any` it is the hard floor under another method.
    """

    method: Literal["min_window"] = "min_window"
    threshold: float = Field(default=-0.7, le=0, allow_inf_nan=False)
    window: int = Field(default=8, ge=1)

    @property
    def top_logprobs(self) -> int | None:
        return 0

    def statistic(self) -> Statistic:
        return WorstWindow(self.window)


class Hybrid(Confidence):
    """Escalates an answer whose weighted mean of several methods, each mapped to [0, 1], is under `threshold`.

    avg_logprob and min_window: exp(s), a probability. margin: tanh(s / 2), how far the likeliest token leads the
    second. entropy: as it is. `weights` need not sum to 1; a method that is not named is not read. Defaults: 0.6,
    and equal weights for the three that need at most two alternatives.
    """

    method: Literal["hybrid"] = "hybrid"
    threshold: float = Field(default=0.6, ge=0, le=1)
    weights: dict[Part, Weight] = Field(default={"avg_logprob": 1.0, "margin": 1.0, "min_window": 1.0}, min_length=1)
    window: int = Field(default=8, ge=1)  # of min_window
    alternatives: int = Field(default=5, ge=2, le=20)  # of entropy

    @property
    def top_logprobs(self) -> int | None:
        if "entropy" in self.weights:
            return self.alternatives
        return 2 if "margin" in self.weights else 0

    def statistic(self) -> Statistic:
        return WeightedMean(self.weights, self.window, self.alternatives)


AnyConfidence = Annotated[AvgLogprob | Margin | Entropy | MinWindow | Hybrid, Field(discriminator="method")]


class _ThresholdJudge(Judge):
    """Measures each token; a token that cannot be measured escalates at once."""

    def __init__(self, threshold: float, statistic: Statistic) -> None:
        self._threshold = threshold
        self._statistic = statistic
        self._limit: int | None = None

    def score(self) -> float | None:
        return self._statistic.score()

    def on_request(self, facts: RequestFacts) -> Decision:
        self._limit = facts.answer_limit
        return WAIT

    def on_token(self, token: Token) -> Decision:
        try:
            self._statistic.add(token)
        except Unmeasured:
            return Decision.escalate("no_logprobs")
        if self._statistic.bound(self._limit) < self._threshold:
            return Decision.escalate("low_confidence")
        return WAIT

    def on_finish(self, finish: Finish) -> Decision:
        score = self.score()
        if score is None:
            return Decision.escalate("empty_answer")
        if score < self._threshold:
            return Decision.escalate("low_confidence")
        return Decision.keep("confident")
