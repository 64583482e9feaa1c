"""Policies that read the small model's token log-probabilities.

All share one shape: a statistic of the tokens seen so far, and a threshold under which the request
escalates. Words they may answer with: `confident`, `low_confidence`, `empty_answer` (no token at all),
`no_logprobs` (a token came without what the policy reads: an unmeasured answer is not a confident one).
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Literal

from pydantic import Field

from policies.base import Judge, Policy
from policies.signals import WAIT, Decision, Finish, Token


class AvgLogprob(Policy):
    """Escalates an answer whose mean token log-probability (nats, at most 0) is under `threshold`.

    The default, -0.2, is a geometric mean token probability of 0.82.
    """

    method: Literal["avg_logprob"] = "avg_logprob"
    threshold: float = Field(default=-0.2, le=0, allow_inf_nan=False)

    @property
    def top_logprobs(self) -> int | None:
        return 0

    def begin(self) -> Judge:
        return _MeanJudge(self.threshold, _own_logprob)


class Margin(Policy):
    """Escalates an answer whose mean gap (nats, at least 0) between the two likeliest tokens is under `threshold`.

    The default, 1.0: on average the first choice is e times as likely as the second.
    """

    method: Literal["margin"] = "margin"
    threshold: float = Field(default=1.0, ge=0, allow_inf_nan=False)

    @property
    def top_logprobs(self) -> int | None:
        return 2

    def begin(self) -> Judge:
        return _MeanJudge(self.threshold, _gap)


class MinWindow(Policy):
    """Escalates as soon as any `window` tokens in a row have a mean log-probability under `threshold`.

    An answer shorter than the window is judged by its own mean. Defaults: 8 tokens, -0.7 nats (probability 0.5).
    """

    method: Literal["min_window"] = "min_window"
    threshold: float = Field(default=-0.7, le=0, allow_inf_nan=False)
    window: int = Field(default=8, ge=1)

    @property
    def top_logprobs(self) -> int | None:
        return 0

    def begin(self) -> Judge:
        return _WindowJudge(self.threshold, self.window)


class _ThresholdJudge(Judge):
    """Measures each token; a token that cannot be measured escalates at once."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    @abstractmethod
    def _add(self, token: Token) -> Decision:
        """Takes a token in. Raises `_Unmeasured` where the token lacks what is read."""

    def on_token(self, token: Token) -> Decision:
        try:
            return self._add(token)
        except _Unmeasured:
            return Decision.escalate("no_logprobs")

    def on_finish(self, finish: Finish) -> Decision:
        score = self.score()
        if score is None:
            return Decision.escalate("empty_answer")
        return self._judge(score)

    def _judge(self, score: float) -> Decision:
        if score < self._threshold:
            return Decision.escalate("low_confidence")
        return Decision.keep("confident")


class _MeanJudge(_ThresholdJudge):
    def __init__(self, threshold: float, measure: Callable[[Token], float]) -> None:
        super().__init__(threshold)
        self._measure = measure
        self._sum = 0.0
        self._count = 0

    def score(self) -> float | None:
        return self._sum / self._count if self._count else None

    def _add(self, token: Token) -> Decision:
        self._sum += self._measure(token)
        self._count += 1
        return WAIT


class _WindowJudge(_ThresholdJudge):
    def __init__(self, threshold: float, window: int) -> None:
        super().__init__(threshold)
        self._window = window
        self._recent: deque[float] = deque(maxlen=window)
        self._worst: float | None = None  # of the full windows seen

    def score(self) -> float | None:
        if self._worst is not None:
            return self._worst
        return self._mean() if self._recent else None

    def _add(self, token: Token) -> Decision:
        self._recent.append(_own_logprob(token))
        if len(self._recent) < self._window:
            return WAIT
        mean = self._mean()
        self._worst = mean if self._worst is None else min(self._worst, mean)
        return self._judge(mean) if mean < self._threshold else WAIT

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)


class _Unmeasured(Exception):
    """A token lacks the log-probabilities that the policy reads."""


def _own_logprob(token: Token) -> float:
    if token.logprob is None or math.isnan(token.logprob):
        raise _Unmeasured
    return token.logprob


def _gap(token: Token) -> float:
    if len(token.top) < 2:
        raise _Unmeasured
    first, second = sorted(token.top, reverse=True)[:2]
    if not math.isfinite(first):
        raise _Unmeasured
    return first - second
