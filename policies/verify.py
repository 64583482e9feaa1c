"""The small model judges its own answer, in one token."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from policies.base import Judge, Policy
from policies.signals import WAIT, Decision, Finish, SelfCheck

Word = Annotated[str, StringConstraints(strip_whitespace=True, to_lower=True, min_length=1)]


class SelfVerify(Policy):
    """Escalates an answer that the small model itself thinks wrong: P(yes) under `threshold`.

    The whole answer is put before the small model with `ask` as a last user turn, and one token is sampled. Each
    alternative counts as yes or no where its text, without spaces and in lower case, is one of `yes_words` or
    `no_words`: P(yes) = sum of yes / sum of both. In YAML, where they are booleans, "yes" and "no" need quotes.

    Words: `verified`, `self_doubt`, `no_verdict` (neither word is among the alternatives, or the call failed),
    `empty_answer` (nothing to judge; the call is saved). Defaults: 0.5, 10 alternatives, the English words.
    """

    method: Literal["self_verify"] = "self_verify"
    threshold: float = Field(default=0.5, ge=0, le=1)
    ask: str = Field(default="Is your answer above correct and complete? Reply with one word: yes or no.", min_length=1)
    yes_words: tuple[Word, ...] = Field(default=("yes",), min_length=1)
    no_words: tuple[Word, ...] = Field(default=("no",), min_length=1)
    alternatives: int = Field(default=10, ge=2, le=20)

    @property
    def question(self) -> str | None:
        return self.ask

    @property
    def question_logprobs(self) -> int:
        return self.alternatives

    def begin(self) -> Judge:
        return _VerifyJudge(self)


class _VerifyJudge(Judge):
    def __init__(self, policy: SelfVerify) -> None:
        self._policy = policy
        self._score: float | None = None

    def score(self) -> float | None:
        return self._score

    def on_finish(self, finish: Finish) -> Decision:
        if finish.says_nothing():
            return Decision.escalate("empty_answer")
        return WAIT

    def on_check(self, check: SelfCheck) -> Decision:
        yes, no = (_weight(check, words) for words in (self._policy.yes_words, self._policy.no_words))
        if yes + no == 0:
            return Decision.escalate("no_verdict")
        self._score = yes / (yes + no)
        if self._score < self._policy.threshold:
            return Decision.escalate("self_doubt")
        return Decision.keep("verified")


def _weight(check: SelfCheck, words: tuple[str, ...]) -> float:
    """The probability of all alternatives that are one of the words; one that is not a number counts for nothing."""
    said = (math.exp(min(logprob, 0.0)) for text, logprob in check.top if text.strip().lower() in words)
    return sum(value for value in said if not math.isnan(value))
