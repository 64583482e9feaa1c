"""The operator names the share to escalate; the threshold follows the traffic."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from typing import Literal

from pydantic import Field, PrivateAttr

from policies.base import Judge, Policy
from policies.confidence import AnyConfidence, AvgLogprob
from policies.measures import Statistic, Unmeasured
from policies.signals import WAIT, Decision, Finish, RequestFacts, Token


class TargetRate(Policy):
    """Escalates the `rate` least confident of the answers, as `of` scores them.

    The threshold is the k-th smallest of the last `window` scores of that tier, k = round(rate (n + 1)), at least 1;
    a score under it escalates. A score that equals it escalates while fewer than `rate` of the window have, so that
    scores of few values meet the rate too. Start: until `start` scores have come, the threshold of `of` holds.
    Nothing is drawn by lot: the same scores in the same order give the same decisions. Answers are decided when they
    are complete; one that cannot be measured escalates, and counts as the least confident.

    Its scores are those of the answers that it decided: where an `any` has escalated before, it is not asked, and the
    share of all requests is larger. It remembers for as long as the policy object lives.

    Defaults: 0.2 of `avg_logprob`, 500 scores, 50 to start. Words: as those of `of`.
    """

    method: Literal["target_rate"] = "target_rate"
    rate: float = Field(default=0.2, gt=0, lt=1)
    of: AnyConfidence = AvgLogprob()
    window: int = Field(default=500, ge=20)
    start: int = Field(default=50, ge=1)

    _seen: dict[str, Window] = PrivateAttr(default_factory=dict)

    @property
    def top_logprobs(self) -> int | None:
        return self.of.top_logprobs

    def seen(self, tier: str) -> Window:
        """What is remembered of the answers of a tier."""
        return self._seen.setdefault(tier, Window(self.window))

    def threshold(self, tier: str) -> float:
        """The score under which an answer of that tier escalates now."""
        seen = self.seen(tier)
        return seen.quantile(self.rate) if self._knows(seen) else self.of.threshold

    def decide(self, tier: str, score: float) -> bool:
        """True to escalate. Remembers the score."""
        seen, threshold = self.seen(tier), self.threshold(tier)
        is_tie = self._knows(seen) and score == threshold
        escalates = score < threshold or (is_tie and seen.escalated_share() < self.rate)
        seen.add(score, escalates)
        return escalates

    def begin(self) -> Judge:
        return _RateJudge(self)

    def _knows(self, seen: Window) -> bool:
        return len(seen) >= min(self.start, self.window)


class Window:
    """The last scores of one tier, and which of them escalated."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[tuple[float, bool]] = deque()
        self._sorted: list[float] = []
        self._escalated = 0

    def __len__(self) -> int:
        return len(self._recent)

    def add(self, score: float, escalated: bool) -> None:
        if len(self._recent) == self._size:
            oldest, had_escalated = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            self._escalated -= had_escalated
        self._recent.append((score, escalated))
        insort(self._sorted, score)
        self._escalated += escalated

    def quantile(self, rate: float) -> float:
        """The k-th smallest score, k = round(rate (n + 1)), from 1 to n."""
        n = len(self._sorted)
        return self._sorted[min(max(round(rate * (n + 1)), 1), n) - 1]

    def escalated_share(self) -> float:
        return self._escalated / len(self._recent) if self._recent else 0.0


class _RateJudge(Judge):
    def __init__(self, policy: TargetRate) -> None:
        self._policy = policy
        self._statistic: Statistic = policy.of.statistic()
        self._tier = ""

    def score(self) -> float | None:
        return self._statistic.score()

    def on_request(self, facts: RequestFacts) -> Decision:
        self._tier = facts.tier
        return WAIT

    def on_token(self, token: Token) -> Decision:
        try:
            self._statistic.add(token)
        except Unmeasured:
            return self._unmeasured("no_logprobs")
        return WAIT

    def on_finish(self, finish: Finish) -> Decision:
        score = self.score()
        if score is None:
            return self._unmeasured("empty_answer")
        if self._policy.decide(self._tier, score):
            return Decision.escalate("low_confidence")
        return Decision.keep("confident")

    def _unmeasured(self, reason: str) -> Decision:
        self._policy.seen(self._tier).add(-math.inf, True)
        return Decision.escalate(reason)
