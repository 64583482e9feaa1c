"""Policies made of policies. One rule serves all three: a vote.

Each part votes with its weight. The request escalates as soon as the weight of the parts that escalate reaches
what is needed, and is kept as soon as the parts that escalate and those that still wait cannot reach it together.
A part that has answered is not asked again. The reason is that of the part that tipped the vote: of the parts that
answered at that moment, the first in the list, so list permissions last. The tier is the first that is named by a part
that escalates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from policies.base import Judge, Policy
from policies.fields import Weight
from policies.signals import WAIT, Decision, Finish, RequestFacts, SelfCheck, Token, Verdict

if TYPE_CHECKING:
    from policies.catalogue import AnyPart  # the parts may be combinations again: the catalogue ties the knot


class Combination(Policy):
    """Several policies that judge one request together."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[Policy]:
        """In the order of the config."""

    @property
    def top_logprobs(self) -> int | None:
        return max((n for part in self.parts if (n := part.top_logprobs) is not None), default=None)

    @property
    def question(self) -> str | None:
        return next((part.question for part in self.parts if part.question is not None), None)

    @property
    def question_logprobs(self) -> int:
        return max(part.question_logprobs for part in self.parts)

    @property
    def tiers(self) -> frozenset[str]:
        return frozenset().union(*(part.tiers for part in self.parts))

    @model_validator(mode="after")
    def _asks_one_question(self) -> Combination:
        questions = sorted({part.question for part in self.parts if part.question is not None})
        if len(questions) > 1:
            raise ValueError(f"two parts ask the small model different questions: {questions}; ask one")
        return self


class AnyOf(Combination):
    """Escalates when one part does, as soon as it does; keeps when all parts keep."""

    method: Literal["any"] = "any"
    of: list[AnyPart] = Field(min_length=1)

    @property
    def parts(self) -> Sequence[Policy]:
        return self.of

    def begin(self) -> Judge:
        return _VoteJudge([(1.0, part.begin()) for part in self.of], needed=1.0)


class AllOf(Combination):
    """Escalates when every part does; keeps when one part keeps, as soon as it does."""

    method: Literal["all"] = "all"
    of: list[AnyPart] = Field(min_length=1)

    @property
    def parts(self) -> Sequence[Policy]:
        return self.of

    def begin(self) -> Judge:
        return _VoteJudge([(1.0, part.begin()) for part in self.of], needed=float(len(self.of)))


class Vote(BaseModel):
    """A part of `weighted`; its weight is 1 unless set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: AnyPart
    weight: Weight = 1.0


class Weighted(Combination):
    """Escalates when the parts that do hold at least `threshold` of all weight. Default: half."""

    method: Literal["weighted"] = "weighted"
    votes: list[Vote] = Field(min_length=1)
    threshold: float = Field(default=0.5, gt=0, le=1)

    @property
    def parts(self) -> Sequence[Policy]:
        return [vote.policy for vote in self.votes]

    def begin(self) -> Judge:
        needed = self.threshold * sum(vote.weight for vote in self.votes)
        return _VoteJudge([(vote.weight, vote.policy.begin()) for vote in self.votes], needed)


class _VoteJudge(Judge):
    def __init__(self, voters: list[tuple[float, Judge]], needed: float) -> None:
        self._voters = voters
        self._needed = needed
        self._said = [WAIT] * len(voters)

    def score(self) -> float | None:
        """That of the first part that measured one."""
        return next((score for _, judge in self._voters if (score := judge.score()) is not None), None)

    def on_request(self, facts: RequestFacts) -> Decision:
        return self._poll(lambda judge: judge.on_request(facts))

    def on_token(self, token: Token) -> Decision:
        return self._poll(lambda judge: judge.on_token(token))

    def on_finish(self, finish: Finish) -> Decision:
        return self._poll(lambda judge: judge.on_finish(finish))

    def on_check(self, check: SelfCheck) -> Decision:
        return self._poll(lambda judge: judge.on_check(check))

    def _poll(self, ask: Callable[[Judge], Decision]) -> Decision:
        """Asks the parts that still wait, and counts."""
        answered = []
        for index, (_, judge) in enumerate(self._voters):
            if self._said[index].verdict is Verdict.WAIT:
                self._said[index] = ask(judge)
                answered.append(self._said[index])
        if self._weight(Verdict.ESCALATE) >= self._needed:
            verdict = Verdict.ESCALATE
        elif self._weight(Verdict.ESCALATE, Verdict.WAIT) < self._needed:
            verdict = Verdict.KEEP
        else:
            return WAIT
        tipped = next(decision for decision in answered if decision.verdict is verdict)
        if verdict is Verdict.KEEP:
            return tipped
        return tipped._replace(tier=next((said.tier for said in self._said if said.tier is not None), None))

    def _weight(self, *verdicts: Verdict) -> float:
        pairs = zip(self._voters, self._said, strict=True)
        return sum(weight for (weight, _), said in pairs if said.verdict in verdicts)
