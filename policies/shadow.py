"""A share of the kept requests also goes to the next tier, off the path, to measure how often the two agree."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Literal

from pydantic import PrivateAttr

from policies.base import Judge, Policy
from policies.fields import Share
from policies.signals import Decision, Finish, RequestFacts, SelfCheck, Token, Verdict

if TYPE_CHECKING:
    from policies.catalogue import AnyPart


class Shadow(Policy):
    """Decides as `of` does, and marks `share` of what it keeps with `Decision.shadow`; the router makes the call.

    Which ones is drawn from `seed`: the n-th kept request of this policy object is marked or not, whatever it holds.
    Only the outermost policy may be one. Defaults: 0.05, seed 0.
    """

    method: Literal["shadow"] = "shadow"
    of: AnyPart
    share: Share = 0.05
    seed: int = 0

    _random: random.Random = PrivateAttr()

    def model_post_init(self, context: object) -> None:
        self._random = random.Random(self.seed)

    @property
    def top_logprobs(self) -> int | None:
        return self.of.top_logprobs

    @property
    def question(self) -> str | None:
        return self.of.question

    @property
    def question_logprobs(self) -> int:
        return self.of.question_logprobs

    @property
    def tiers(self) -> frozenset[str]:
        return self.of.tiers

    def draw(self) -> bool:
        """True where the next kept request is marked."""
        return self._random.random() < self.share

    def begin(self) -> Judge:
        return _ShadowJudge(self, self.of.begin())


class _ShadowJudge(Judge):
    def __init__(self, policy: Shadow, judge: Judge) -> None:
        self._policy = policy
        self._judge = judge

    def score(self) -> float | None:
        return self._judge.score()

    def on_request(self, facts: RequestFacts) -> Decision:
        return self._marked(self._judge.on_request(facts))

    def on_token(self, token: Token) -> Decision:
        return self._marked(self._judge.on_token(token))

    def on_finish(self, finish: Finish) -> Decision:
        return self._marked(self._judge.on_finish(finish))

    def on_check(self, check: SelfCheck) -> Decision:
        return self._marked(self._judge.on_check(check))

    def _marked(self, decision: Decision) -> Decision:
        if decision.verdict is Verdict.KEEP:
            return decision._replace(shadow=self._policy.draw())
        return decision
