"""Laws of choosing positions: as many as the budget says, the highest scores, the same ones each time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import PlanError
from sglang_ext.plan import budget_size
from sglang_ext.transfer.selectors import top_positions
from tests.kv.builders import laws

# Few different values, so that ties are common.
scores_ = st.lists(st.integers(0, 4), max_size=40).map(lambda values: torch.tensor(values, dtype=torch.float32))
rhos = st.integers(0, 100).map(lambda percent: percent / 100)


@laws
@given(scores=scores_, rho=rhos)
def test_the_budget_counts_the_last_position_which_is_not_scored(scores, rho):
    chosen = top_positions(scores, rho)
    assert len(chosen) == budget_size(rho, len(scores) + 1) - 1
    assert chosen.dtype == torch.int64


@laws
@given(scores=scores_, rho=rhos)
def test_positions_ascend_without_repeats(scores, rho):
    chosen = top_positions(scores, rho).tolist()
    assert chosen == sorted(set(chosen))
    assert all(0 <= position < len(scores) for position in chosen)


@laws
@given(scores=scores_, rho=rhos)
def test_the_highest_scores_are_chosen_and_ties_go_to_the_earlier(scores, rho):
    chosen = top_positions(scores, rho).tolist()
    ranked = sorted(range(len(scores)), key=lambda position: (-float(scores[position]), position))
    assert set(chosen) == set(ranked[: len(chosen)])


@laws
@given(scores=scores_, one=rhos, other=rhos)
def test_a_larger_budget_keeps_what_a_smaller_one_chose(scores, one, other):
    small, large = sorted((one, other))
    assert set(top_positions(scores, small).tolist()) <= set(top_positions(scores, large).tolist())


@laws
@given(scores=scores_)
def test_the_ends_of_the_budget_choose_nothing_and_everything(scores):
    assert top_positions(scores, 0.0).tolist() == []
    assert top_positions(scores, 1.0).tolist() == list(range(len(scores)))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_scores_that_are_not_finite_are_refused(number, rho):
    with pytest.raises(PlanError, match="NaN or infinite"):
        top_positions(torch.tensor([1.0, number, 2.0]), rho)


def test_a_budget_outside_zero_to_one_is_refused():
    with pytest.raises(PlanError, match="rho"):
        top_positions(torch.ones(4), 1.5)
