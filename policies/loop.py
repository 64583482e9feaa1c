"""An answer that runs in circles."""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import Field

from policies.base import Judge
from policies.rules import NO_SIGNAL, Rule
from policies.signals import WAIT, Decision, Finish, Token


class Loop(Rule):
    """Escalates, while it streams, an answer that repeats one n-gram of tokens over and over. Word: `loop`.

    A loop is a block of 1 to `ngram` tokens that came at least `repeats` times in a row and fills at least `tokens`
    tokens that way; tokens are compared by their text. Defaults: blocks up to 32 tokens, 4 times, 48 tokens: a ruled
    line or a table's rule is not a loop.
    """

    method: Literal["loop"] = "loop"
    ngram: int = Field(default=32, ge=1, le=256)
    repeats: int = Field(default=4, ge=2)
    tokens: int = Field(default=48, ge=2)

    @property
    def top_logprobs(self) -> int | None:
        return 0  # the worker names single tokens only together with their log-probabilities

    def begin(self) -> Judge:
        return _LoopJudge(self)


class _LoopJudge(Judge):
    def __init__(self, rule: Loop) -> None:
        self._rule = rule
        self._recent: deque[str] = deque(maxlen=rule.ngram)
        self._same = [0] * (rule.ngram + 1)  # by n: how many of the last tokens equal the one n before them

    def on_token(self, token: Token) -> Decision:
        if token.text is None:
            return self._rule.decide(NO_SIGNAL)
        for n in range(1, len(self._recent) + 1):
            self._same[n] = self._same[n] + 1 if self._recent[-n] == token.text else 0
            if self._same[n] + n >= max(self._rule.repeats * n, self._rule.tokens):
                return self._rule.decide("loop")
        self._recent.append(token.text)
        return WAIT

    def on_finish(self, finish: Finish) -> Decision:
        return self._rule.decide(None)
