"""The algebra of votes."""

from __future__ import annotations

from typing import Literal

from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Finish, SelfCheck, Verdict
from policies.base import Judge, Policy
from policies.combine import AllOf, AnyOf, Vote, Weighted
from policies.confidence import AvgLogprob, MinWindow
from policies.fixed import Always, Never
from policies.request_rules import Tools
from policies.verify import SelfVerify
from tests.policies.run import STOP, decide, facts, laws, own, tokens, verdict


class Scripted(Policy):
    """Says its verdict at a given moment: 0 the request, n the n-th token, beyond the answer its end."""

    method: Literal["scripted"] = "scripted"
    escalates: bool
    at: int
    name: str = "scripted"

    def begin(self) -> Judge:
        return _Scripted(self)


class _Scripted(Judge):
    def __init__(self, policy: Scripted) -> None:
        self.policy = policy
        self.moment = 0
        self.said = False

    def _now(self, end: bool = False) -> Decision:
        assert not self.said, "asked again after its answer"
        due = end or self.moment == self.policy.at
        self.moment += 1
        if not due:
            return Decision(Verdict.WAIT, "")
        self.said = True
        make = Decision.escalate if self.policy.escalates else Decision.keep
        return make(self.policy.name)

    def on_request(self, facts):
        return self._now()

    def on_token(self, token):
        return self._now()

    def on_finish(self, finish: Finish) -> Decision:
        return self._now(end=True)


ANSWER = own([-0.5] * 4)
scripted = st.lists(st.builds(Scripted, escalates=st.booleans(), at=st.integers(0, 6)), min_size=1, max_size=6)
weights = st.lists(st.integers(1, 9), min_size=6, max_size=6)
shares = st.floats(0.01, 1)


def joined(kind, parts):
    return kind.model_construct(of=parts)


def vote(parts, weights, threshold):
    votes = [Vote.model_construct(policy=p, weight=float(w)) for p, w in zip(parts, weights, strict=False)]
    return Weighted.model_construct(votes=votes, threshold=threshold)


def moment(part: Scripted) -> int:
    return min(part.at, len(ANSWER) + 1)


@laws
@given(scripted)
def test_any_escalates_with_the_first_that_does_and_all_keeps_with_the_first_that_does(parts):
    for kind, decisive in ((AnyOf, True), (AllOf, False)):
        deciding = [moment(part) for part in parts if part.escalates is decisive]
        decision, read = decide(joined(kind, parts), ANSWER)
        assert (decision.verdict is Verdict.ESCALATE) == (decisive if deciding else not decisive)
        at = min(deciding) if deciding else max(moment(part) for part in parts)
        assert read == min(at, len(ANSWER))


@laws
@given(scripted, st.randoms())
def test_the_order_of_the_parts_changes_no_verdict(parts, chance):
    shuffled = list(parts)
    chance.shuffle(shuffled)
    for kind in (AnyOf, AllOf):
        one, other = decide(joined(kind, parts), ANSWER), decide(joined(kind, shuffled), ANSWER)
        assert (one[0].verdict, one[1]) == (other[0].verdict, other[1])


@laws
@given(scripted)
def test_any_and_all_are_each_others_opposite(parts):
    """Keep where the other escalates, with every part turned round, at the same token."""
    turned = [part.model_copy(update={"escalates": not part.escalates}) for part in parts]
    one, other = decide(joined(AnyOf, parts), ANSWER), decide(joined(AllOf, turned), ANSWER)
    assert (one[0].verdict is Verdict.ESCALATE) == (other[0].verdict is Verdict.KEEP)
    assert one[1] == other[1]


@laws
@given(scripted, scripted)
def test_nesting_changes_nothing(left, right):
    for kind in (AnyOf, AllOf):
        flat, nested = joined(kind, [*left, *right]), joined(kind, [joined(kind, left), joined(kind, right)])
        assert [(d.verdict, n) for d, n in [decide(flat, ANSWER)]] == [
            (d.verdict, n) for d, n in [decide(nested, ANSWER)]
        ]


@laws
@given(scripted, weights, shares)
def test_a_weighted_vote_counts_the_weight_that_escalates(parts, weights, threshold):
    held = sum(w for p, w in zip(parts, weights, strict=False) if p.escalates)
    total = sum(w for _, w in zip(parts, weights, strict=False))
    decision, _ = decide(vote(parts, weights, threshold), ANSWER)
    assert (decision.verdict is Verdict.ESCALATE) == (held >= threshold * total)


@laws
@given(scripted, weights, shares, shares)
def test_a_higher_share_needed_never_escalates_more(parts, weights, one, other):
    low, high = sorted((one, other))
    if decide(vote(parts, weights, high), ANSWER)[0].verdict is Verdict.ESCALATE:
        assert decide(vote(parts, weights, low), ANSWER)[0].verdict is Verdict.ESCALATE


@laws
@given(scripted)
def test_all_is_the_vote_that_needs_everything(parts):
    assert decide(vote(parts, [1] * 6, 1.0), ANSWER) == decide(joined(AllOf, parts), ANSWER)


@laws
@given(tokens, st.floats(-20, 0), st.floats(-20, 0))
def test_real_parts_decide_together_as_they_do_alone(answer, one, other):
    parts = [AvgLogprob(threshold=one), MinWindow(threshold=other, window=3)]
    alone = [verdict(part, tokens=answer) is Verdict.ESCALATE for part in parts]
    assert (verdict(AnyOf(of=parts), tokens=answer) is Verdict.ESCALATE) == any(alone)
    assert (verdict(AllOf(of=parts), tokens=answer) is Verdict.ESCALATE) == all(alone)


def test_a_hard_floor_under_a_mean():
    policy = AnyOf(of=[AvgLogprob(threshold=-1), MinWindow(threshold=-4, window=2)])
    assert decide(policy, own([-0.1] * 9 + [-5, -5] + [-0.1] * 9)) == (Decision.escalate("low_confidence"), 11)
    assert decide(policy, own([-0.1] * 9 + [-5, -0.1] + [-0.1] * 9))[0] == Decision.keep("confident")


def test_the_reason_is_that_of_the_part_that_tipped_the_vote():
    late, early = Scripted(escalates=True, at=2, name="late"), Scripted(escalates=True, at=1, name="early")
    assert decide(joined(AnyOf, [late, early]), ANSWER)[0].reason == "early"
    assert decide(joined(AllOf, [late, early]), ANSWER)[0].reason == "late"
    twins = [Scripted(escalates=True, at=1, name=name) for name in ("first", "second")]
    assert decide(joined(AnyOf, twins), ANSWER)[0].reason == "first"


def test_the_tier_is_the_first_that_an_escalating_part_names():
    policy = AllOf(of=[AvgLogprob(threshold=0), Tools(to="huge")])
    assert decide(policy, own([-1.0]), facts(has_tools=True))[0] == Decision.escalate("low_confidence", "huge")
    kept = AnyOf(of=[AvgLogprob(threshold=0), Tools(to="huge")])
    assert decide(kept, own([-1.0]))[0] == Decision.escalate("low_confidence")
    vetoed = AllOf(of=[Tools(to="huge"), Never()])
    assert decide(vetoed, facts=facts(has_tools=True))[0] == Decision.keep("never")


def test_the_question_is_put_only_while_the_vote_is_open():
    said = Finish("stop", text="42")
    doubt = SelfCheck((("no", -0.1),))
    policy = AnyOf(of=[AvgLogprob(threshold=-1), SelfVerify()])
    sure, unsure = policy.begin(), policy.begin()
    assert sure.on_token(own([-0.1])[0]) == unsure.on_token(own([-9.0])[0]) == Decision(Verdict.WAIT, "")
    assert unsure.on_finish(said) == Decision.escalate("low_confidence")
    assert sure.on_finish(said).verdict is Verdict.WAIT
    assert sure.on_check(doubt) == Decision.escalate("self_doubt")
    assert decide(AllOf(of=[SelfVerify(), Never()]), ANSWER, finish=said)[0] == Decision.keep("never")


def test_the_score_is_that_of_the_first_part_that_has_one():
    judge = AnyOf(of=[Tools(), MinWindow(window=1), AvgLogprob()]).begin()
    judge.on_request(facts())
    for token in own([-0.1, -0.3]):
        judge.on_token(token)
    assert judge.score() == -0.3
    assert AnyOf(of=[Always()]).begin().score() is None


def test_an_empty_answer_is_decided_like_any_other():
    assert decide(AnyOf(of=[AvgLogprob(), Never()]), [], finish=STOP)[0] == Decision.escalate("empty_answer")
