"""The cost model's arithmetic: what it fits, what it predicts, what it chooses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.worker.cost import LIFT, NATIVE, CostModel, ForwardCost, PackCost, keys_seen, nonnegative_fit

MS = st.floats(0.001, 10)
LENGTH = st.integers(1, 20_000)
SHARE = st.floats(0, 1)

examples = settings(max_examples=60, deadline=None)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    def forward() -> ForwardCost:
        return ForwardCost(constant=draw(MS), per_token=draw(MS), per_key=draw(MS) / 1000)

    pack = PackCost(map_ms_per_token=draw(MS), bytes_per_token=draw(st.integers(1, 10**6)))
    return CostModel(
        native=forward(), recompute=forward(), transfer_ms_per_byte=draw(st.floats(1e-9, 1e-4)), packs={"p": pack}
    )


@examples
@given(st.integers(1, 60), st.integers(0, 60))
def test_keys_seen_is_what_each_query_sees_up_to_itself(tokens: int, before: int):
    length = before + tokens
    assert keys_seen(length, tokens) == sum(position + 1 for position in range(before, length))


@examples
@given(st.tuples(MS, MS, MS))
def test_exact_measurements_give_their_own_coefficients_back(true: tuple[float, float, float]):
    cost = ForwardCost(constant=true[0], per_token=true[1], per_key=true[2] / 100)
    samples = [(n, keys_seen(n, n), cost.ms(n, keys_seen(n, n))) for n in (16, 64, 256, 1024)]
    fitted = ForwardCost.fitted(samples)
    for tokens, keys in ((1, 1), (100, 5050), (4096, keys_seen(4096, 4096))):
        assert fitted.ms(tokens, keys) == pytest.approx(cost.ms(tokens, keys), rel=1e-4)


@examples
@given(st.lists(st.floats(0.1, 1000), min_size=2, max_size=5), st.integers(0, 2**32))
def test_no_other_non_negative_coefficients_fit_better(measured: list[float], seed: int):
    terms = [[1.0, n, n * n / 50] for n in range(1, len(measured) + 1)]

    def error(coefficients: torch.Tensor) -> float:
        expected = torch.tensor(terms, dtype=torch.float64) @ coefficients
        return float((expected / torch.tensor(measured, dtype=torch.float64) - 1).square().sum())

    found = torch.tensor(nonnegative_fit(terms, measured), dtype=torch.float64)
    assert bool((found >= 0).all())
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    others = (found + noise * found.max().clamp_min(0.1) * 0.1).clamp_min(0)
    assert all(error(found) <= error(other) + 1e-9 for other in others)


@examples
@given(models(), LENGTH, st.integers(1, 500), SHARE, st.integers(0, 3000))
def test_both_ways_cost_something_and_more_for_a_longer_prompt(
    costs: CostModel, length: int, more: int, rho: float, here: int
):
    for ms in (lambda n: costs.native_ms(n, here), lambda n: costs.lift_ms("p", n, rho, here)):
        assert 0 < ms(length) <= ms(length + more) < float("inf")


@examples
@given(models(), LENGTH, SHARE, SHARE, st.integers(0, 20_000), st.integers(0, 20_000))
def test_what_is_here_already_and_a_smaller_budget_make_neither_way_dearer(
    costs: CostModel, length: int, rho: float, other: float, here: int, more: int
):
    assert costs.native_ms(length, here + more) <= costs.native_ms(length, here) * (1 + 1e-9)
    assert costs.lift_ms("p", length, rho, here + more) <= costs.lift_ms("p", length, rho, here) * (1 + 1e-9)
    assert costs.lift_ms("p", length, min(rho, other)) <= costs.lift_ms("p", length, max(rho, other)) * (1 + 1e-9)


def forced(native: float, lifted: float) -> CostModel:
    forward = {"constant": 1.0, "per_key": 0.0}
    pack = PackCost(map_ms_per_token=lifted, bytes_per_token=1)
    return CostModel(
        native=ForwardCost(per_token=native, **forward), recompute=ForwardCost(per_token=native, **forward),
        transfer_ms_per_byte=0.0, packs={"p": pack},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("native", "lifted", "always", "chosen"),
    [(1.0, 0.1, False, LIFT), (1.0, 5.0, False, NATIVE), (1.0, 5.0, True, LIFT), (1.0, 0.1, True, LIFT)],
)
def test_forced_costs_force_the_choice(native: float, lifted: float, always: bool, chosen: str):
    choice = forced(native, lifted).choose("p", 500, 0.3, always)
    assert choice.chosen == chosen
    assert (choice.lift_ms < choice.native_ms) == (lifted < native)


def test_a_prompt_that_is_here_natively_is_not_lifted_and_one_that_was_lifted_is():
    costs = forced(1.0, 0.1)
    assert costs.choose("p", 500, 0.3, False, cached=499).chosen == NATIVE
    dear = forced(1.0, 5.0)
    assert dear.choose("p", 500, 0.3, False).chosen == NATIVE
    assert dear.choose("p", 500, 0.3, False, held=499).chosen == LIFT
