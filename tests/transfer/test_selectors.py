"""Laws of choosing positions: as many as the budget says, the highest scores, the same ones each time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import PlanError
from sglang_ext.plan import budget_size
from sglang_ext.transfer.selectors import NAMES, Coverage, Fraction, scorer_named, top_positions
from tests.kv.builders import laws, random_block
from tests.transfer.conftest import SOURCE

# Few different values, so that ties are common.
scores_ = st.lists(st.integers(0, 4), max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))
rhos = st.integers(0, 100).map(lambda percent: percent / 100)


@laws
@given(scores=scores_, rho=rhos)
def test_the_budget_counts_the_last_position_which_is_not_scored(scores, rho):
    chosen = top_positions(scores, Fraction(rho))
    assert len(chosen) == budget_size(rho, len(scores) + 1) - 1
    assert chosen.dtype == torch.int64


@laws
@given(scores=scores_, rho=rhos)
def test_positions_ascend_without_repeats(scores, rho):
    chosen = top_positions(scores, Fraction(rho)).tolist()
    assert chosen == sorted(set(chosen))
    assert all(0 <= position < len(scores) for position in chosen)


@laws
@given(scores=scores_, rho=rhos)
def test_the_highest_scores_are_chosen_and_ties_go_to_the_earlier(scores, rho):
    chosen = top_positions(scores, Fraction(rho)).tolist()
    ranked = sorted(range(len(scores)), key=lambda position: (-float(scores[position]), position))
    assert set(chosen) == set(ranked[: len(chosen)])


@laws
@given(scores=scores_, one=rhos, other=rhos)
def test_a_larger_budget_keeps_what_a_smaller_one_chose(scores, one, other):
    small, large = sorted((one, other))
    assert set(top_positions(scores, Fraction(small)).tolist()) <= set(top_positions(scores, Fraction(large)).tolist())


@laws
@given(scores=scores_)
def test_the_ends_of_the_budget_choose_nothing_and_everything(scores):
    assert top_positions(scores, Fraction(0.0)).tolist() == []
    assert top_positions(scores, Fraction(1.0)).tolist() == list(range(len(scores)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_scores_that_are_not_finite_are_refused(number, rho):
    with pytest.raises(PlanError, match="NaN or infinite"):
        top_positions(torch.tensor([1.0, number, 2.0]), Fraction(rho))


def test_a_budget_outside_zero_to_one_is_refused():
    with pytest.raises(PlanError, match="rho"):
        top_positions(torch.ones(4), Fraction(1.5))


shares = st.integers(0, 100).map(lambda percent: percent / 100)


@laws
@given(scores=scores_, share=shares)
def test_coverage_takes_the_smallest_set_that_holds_the_share(scores, share):
    chosen = top_positions(scores, Coverage(share))
    total, held = float(scores.sum()), float(scores[chosen].sum())
    assert held >= share * total - 1e-9
    # One position less, and the largest ones at that, would not do.
    assert len(chosen) == 0 or float(scores[chosen].sum() - scores[chosen].min()) < share * total


@laws
@given(scores=scores_, one=shares, other=shares)
def test_a_larger_share_keeps_what_a_smaller_one_chose(scores, one, other):
    small, large = sorted((one, other))
    chosen = [set(top_positions(scores, Coverage(share)).tolist()) for share in (small, large)]
    assert chosen[0] <= chosen[1]


def test_coverage_costs_an_even_prompt_more_than_a_peaked_one():
    even, peaked = torch.ones(10), torch.tensor([100.0] + [1.0] * 9)
    assert len(top_positions(even, Coverage(0.8))) == 8
    assert top_positions(peaked, Coverage(0.8)).tolist() == [0]
    assert top_positions(torch.zeros(10), Coverage(1.0)).tolist() == []


def test_a_share_outside_zero_to_one_is_refused():
    with pytest.raises(PlanError, match="coverage"):
        top_positions(torch.ones(4), Coverage(1.2))


def test_rank_disagreement_sums_over_layers():
    disagreement = torch.tensor([[1.0, 5.0, 0.0], [2.0, 0.0, 4.0]])
    assert scorer_named("rank_disagreement")(random_block(SOURCE, 3), disagreement).tolist() == [3.0, 5.0, 4.0]


def test_source_attention_is_the_blocks_own_and_asked_for_where_it_is_missing():
    block = random_block(SOURCE, 3)
    with pytest.raises(PlanError, match="attention"):
        scorer_named("source_attention")(block, torch.zeros(2, 3))
    received = torch.tensor([0.2, 0.5, 0.3])
    assert scorer_named("source_attention")(replace(block, attention=received), torch.zeros(2, 3)) is received


@laws
@given(length=st.integers(1, 40), seed=st.integers(0, 1000))
def test_random_depends_on_the_tokens_and_the_seed_alone(length, seed):
    block = random_block(SOURCE, length)
    draw = scorer_named(f"random:{seed}")
    scores = draw(block, torch.zeros(2, length))
    assert torch.equal(scores, draw(replace(block, keys=block.keys * 2), torch.ones(5, length)))
    assert not torch.equal(scores, scorer_named(f"random:{seed + 1}")(block, torch.zeros(2, length)))
    other = replace(block, tokens=block.tokens + 1)
    assert not torch.equal(scores, draw(other, torch.zeros(2, length)))
    assert bool(((scores >= 0) & (scores < 1)).all())


@pytest.mark.parametrize("name", ["nonsense", "random:x", "random:-1", "rank_disagreement:3", ""])
def test_an_unknown_selector_is_named_with_what_is_known(name):
    with pytest.raises(PlanError, match=NAMES[0]):
        scorer_named(name)
