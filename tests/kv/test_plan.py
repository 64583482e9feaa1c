"""Laws of a plan: every position is filled or computed, exactly once, and the budget is the paper's."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from sglang_ext.errors import PlanError
from sglang_ext.plan import Fill, FillKind, PrefillPlan, budget_size, native, repaired
from tests.kv.builders import laws

KINDS = list(FillKind)


@st.composite
def fills_of(draw, length: int) -> list[Fill]:
    """Disjoint fills over some of the positions, neighbours and gaps both possible."""
    edges = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
    spans = zip(edges, edges[1:])
    return [Fill(a, b, draw(st.sampled_from(KINDS))) for a, b in spans if draw(st.booleans())]


@st.composite
def plans(draw) -> tuple[int, list[Fill], list[int]]:
    """Parts of a valid plan: gaps, the last position and some filled ones are computed."""
    length = draw(st.integers(1, 40))
    fills = draw(fills_of(length))
    covered = {p for fill in fills for p in range(fill.start, fill.stop)}
    chosen = draw(st.sets(st.integers(0, length - 1)))
    return length, fills, sorted((set(range(length)) - covered) | chosen | {length - 1})


def plan(length: int, fills: list[Fill], compute: list[int]) -> PrefillPlan:
    return PrefillPlan(length, tuple(fills), torch.tensor(compute, dtype=torch.int64))


@laws
@given(plans())
def test_every_position_is_filled_or_computed_exactly_once(parts):
    made = plan(*parts)
    positions = made.filled.tolist() + made.compute.tolist()
    assert sorted(positions) == list(range(parts[0]))
    assert all(any(f.start <= p < f.stop for f in parts[1]) for p in made.filled.tolist())


@laws
@given(plans(), st.data())
def test_a_gap_is_refused_by_position(parts, data):
    length, fills, compute = parts
    covered = {p for fill in fills for p in range(fill.start, fill.stop)}
    gaps = [p for p in compute if p not in covered and p != length - 1]
    assume(gaps)
    missing = data.draw(st.sampled_from(gaps))
    with pytest.raises(PlanError, match=f"position {missing} of {length} is neither filled nor computed"):
        plan(length, fills, [p for p in compute if p != missing])


@laws
@given(plans(), st.data())
def test_a_double_fill_is_refused_by_position(parts, data):
    length, fills, compute = parts
    filled = [p for fill in fills for p in range(fill.start, fill.stop)]
    assume(filled)
    twice = data.draw(st.sampled_from(filled))
    again = Fill(twice, twice + 1, data.draw(st.sampled_from(KINDS)))
    with pytest.raises(PlanError, match=f"position {twice} of {length} is filled twice"):
        plan(length, [*fills, again], compute)


@laws
@given(plans())
def test_a_plan_without_the_last_position_is_refused(parts):
    length, fills, compute = parts
    assume(length > 1)
    everything = [Fill(0, length, FillKind.MAPPED)]
    with pytest.raises(PlanError, match=f"end with the last position {length - 1}"):
        plan(length, everything, [p for p in compute if p != length - 1] or [0])


@pytest.mark.parametrize("compute", [[1, 0, 3], [0, 0, 3], [0, 2, 2, 3], [3, 3]])
def test_unsorted_or_repeated_positions_are_refused(compute):
    with pytest.raises(PlanError, match="sorted and without repeats"):
        plan(4, [Fill(0, 4, FillKind.MAPPED)], compute)


@pytest.mark.parametrize("compute", [[-1, 3], [0, 4], [4]])
def test_a_computed_position_outside_the_prompt_is_refused(compute):
    with pytest.raises(PlanError, match=r"must lie in \[0, 4\)"):
        plan(4, [Fill(0, 4, FillKind.MAPPED)], compute)


@pytest.mark.parametrize("span", [(-1, 2), (2, 5), (3, 2), (5, 5)])
def test_a_fill_outside_the_prompt_is_refused(span):
    with pytest.raises(PlanError, match="outside a prompt of 4 positions"):
        plan(4, [Fill(*span, FillKind.MAPPED)], [0, 1, 2, 3])


@pytest.mark.parametrize(
    "compute",
    [torch.tensor([], dtype=torch.int64), torch.tensor([3], dtype=torch.int32), torch.tensor([[3]]), torch.tensor(3)],
)
def test_compute_is_an_int64_vector_that_is_not_empty(compute):
    with pytest.raises(PlanError, match="non-empty int64 vector"):
        PrefillPlan(4, (Fill(0, 4, FillKind.MAPPED),), compute)


def test_a_prompt_without_positions_is_refused():
    with pytest.raises(PlanError, match="at least one position"):
        native(0)


@given(length=st.integers(1, 100))
@laws
def test_native_computes_everything(length):
    made = native(length)
    assert made.compute.tolist() == list(range(length))
    assert made.fills == () and len(made.filled) == 0


@laws
@given(length=st.integers(1, 40), data=st.data())
def test_repaired_computes_gaps_chosen_and_last_positions_and_no_others(length, data):
    fills = data.draw(fills_of(length))
    chosen = data.draw(st.sets(st.integers(0, length - 1)))
    made = repaired(length, fills, torch.tensor(sorted(chosen), dtype=torch.int64))
    covered = {p for fill in fills for p in range(fill.start, fill.stop)}
    assert set(made.compute.tolist()) == (set(range(length)) - covered) | chosen | {length - 1}
    assert made.fills == tuple(fills)


@pytest.mark.parametrize("chosen", [[-2], [4], [0, 9]])
def test_repairing_a_position_outside_the_prompt_is_refused(chosen):
    with pytest.raises(PlanError):
        repaired(4, [Fill(0, 4, FillKind.MAPPED)], torch.tensor(chosen))


@pytest.mark.parametrize("length", [0, -1])
def test_repairing_no_prompt_is_refused(length):
    with pytest.raises(PlanError):
        repaired(length, [], torch.tensor([], dtype=torch.int64))


@laws
@given(thousandths=st.integers(0, 1000), length=st.integers(1, 200_000))
def test_the_budget_is_the_ceiling_of_the_decimal_product(thousandths, length):
    assert budget_size(thousandths / 1000, length) == max(1, ceil(Fraction(thousandths, 1000) * length))


def test_binary_rounding_does_not_buy_a_position():
    assert ceil(0.07 * 100) == 8  # what the law guards against
    assert [budget_size(0.07, 100), budget_size(0.14, 50), budget_size(0.57, 100)] == [7, 7, 57]


@pytest.mark.parametrize("rho", [-0.001, 1.001, 2, -1, float("nan"), float("inf")])
def test_a_budget_outside_zero_to_one_is_refused(rho):
    with pytest.raises(PlanError, match=r"rho must lie in \[0, 1\]"):
        budget_size(rho, 10)


def test_the_ends_of_the_budget():
    assert budget_size(0.0, 500) == budget_size(0, 1) == 1
    assert budget_size(1.0, 500) == 500
