"""What can be read from an answer's token log-probabilities: one number, higher is surer, that grows token by token."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

from policies.signals import Token

Part = Literal["avg_logprob", "margin", "entropy", "min_window"]
"""The statistics that a weighted mean may hold, by the method that has them."""

UNKNOWN = math.inf
"""The bound of a statistic whose final value may still be anything."""

_ROUNDING = 1e-9  # more than rounding can move a weighted mean of numbers in [0, 1]


class Unmeasured(Exception):
    """A token lacks the log-probabilities that are read."""


class Statistic(ABC):
    """One number of an answer. Fed token by token, in order."""

    @abstractmethod
    def add(self, token: Token) -> None:
        """Takes a token in. Raises `Unmeasured`, and is of no further use then."""

    @abstractmethod
    def score(self) -> float | None:
        """The value for the tokens so far; None before the first."""

    @abstractmethod
    def bound(self, limit: int | None) -> float:
        """The largest value that the whole answer may still have, if it ends within `limit` tokens."""


class Mean(Statistic):
    """The mean of `measure` over the tokens. `best`: the largest value that `measure` can have, None: no such value.

    Kept as best + D / n, where D <= 0 is the sum of what the tokens fall short of the best: with at most N tokens
    the mean ends at best + D / N or lower.
    """

    def __init__(self, measure: Callable[[Token], float], best: float | None) -> None:
        self._measure = measure
        self._base = best or 0.0
        self._bounded = best is not None
        self._sum = 0.0
        self._count = 0

    def add(self, token: Token) -> None:
        self._sum += self._measure(token) - self._base
        self._count += 1

    def score(self) -> float | None:
        return self._base + self._sum / self._count if self._count else None

    def bound(self, limit: int | None) -> float:
        if not self._bounded or limit is None:
            return UNKNOWN
        return self._base + self._sum / max(limit, self._count, 1)


class WorstWindow(Statistic):
    """The lowest mean log-probability of any `window` tokens in a row; of all of them where there are fewer."""

    def __init__(self, window: int) -> None:
        self._recent: deque[float] = deque(maxlen=window)
        self._window = window
        self._worst: float | None = None  # of the full windows seen

    def add(self, token: Token) -> None:
        self._recent.append(own_logprob(token))
        if len(self._recent) == self._window:
            mean = self._mean()
            self._worst = mean if self._worst is None else min(self._worst, mean)

    def score(self) -> float | None:
        if self._worst is not None:
            return self._worst
        return self._mean() if self._recent else None

    def bound(self, limit: int | None) -> float:
        return UNKNOWN if self._worst is None else self._worst

    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)


class WeightedMean(Statistic):
    """Sum of w_i u_i(s_i) over the sum of w_i, where u_i maps the i-th statistic to [0, 1], rising."""

    def __init__(self, parts: Mapping[Part, float], window: int, alternatives: int) -> None:
        """`parts`: the weight of each."""
        makers: dict[Part, Callable[[], Statistic]] = {
            "avg_logprob": mean_logprob,
            "margin": mean_gap,
            "entropy": partial(mean_certainty, alternatives),
            "min_window": partial(WorstWindow, window),
        }
        self._parts = [(weight, UNIT[name], makers[name]()) for name, weight in parts.items()]
        self._total = sum(parts.values())

    def add(self, token: Token) -> None:
        for _, _, statistic in self._parts:
            statistic.add(token)

    def score(self) -> float | None:
        values = [(weight, unit, statistic.score()) for weight, unit, statistic in self._parts]
        if any(value is None for *_, value in values):
            return None
        return sum(weight * unit(value) for weight, unit, value in values if value is not None) / self._total

    def bound(self, limit: int | None) -> float:
        reached = sum(weight * unit(statistic.bound(limit)) for weight, unit, statistic in self._parts)
        return reached / self._total + _ROUNDING


def mean_logprob() -> Mean:
    return Mean(own_logprob, best=0.0)


def mean_gap() -> Mean:
    return Mean(gap, best=None)


def mean_certainty(alternatives: int) -> Mean:
    return Mean(partial(certainty, alternatives=alternatives), best=1.0)


def own_logprob(token: Token) -> float:
    """The token's log-probability, at most 0: workers round some to a little above."""
    if token.logprob is None or math.isnan(token.logprob):
        raise Unmeasured
    return min(token.logprob, 0.0)


def gap(token: Token) -> float:
    """Nats between the two likeliest tokens, at least 0."""
    first, second = _likeliest(token, 2)[:2]
    return first - second


def certainty(token: Token, alternatives: int) -> float:
    """1 - H / log k over the k likeliest tokens: p_i = exp(l_i) / sum exp(l_j), H = -sum p_i log p_i.

    1: all weight on one token; 0: all k equally likely. The weight outside the k is left out of account.
    """
    logprobs = _likeliest(token, alternatives)
    weights = [math.exp(value - logprobs[0]) for value in logprobs]
    total = sum(weights)
    entropy = sum(w / total * (math.log(total) - math.log(w)) for w in weights if w > 0)
    return min(1.0, max(0.0, 1.0 - entropy / math.log(alternatives)))


def probability(logprob: float) -> float:
    """exp(l): for a mean, the geometric mean probability."""
    return math.exp(min(logprob, 0.0))


def lead(nats: float) -> float:
    """tanh(g / 2): how far the likelier of two tokens leads, p1 - p2, where they are the only ones."""
    return math.tanh(nats / 2)


def as_it_is(value: float) -> float:
    return min(value, 1.0)


UNIT: Mapping[Part, Callable[[float], float]] = {
    "avg_logprob": probability,
    "margin": lead,
    "entropy": as_it_is,
    "min_window": probability,
}
"""How the score of each method is mapped to [0, 1]; all rise, and take `UNKNOWN` to 1."""


def _likeliest(token: Token, count: int) -> list[float]:
    """Up to `count` and at least two log-probabilities, falling. Raises `Unmeasured`."""
    logprobs = sorted(token.top, reverse=True)[:count]
    if len(logprobs) < 2 or not math.isfinite(logprobs[0]):
        raise Unmeasured
    return logprobs
