"""Laws of the gather kernel: it reads what Pool.read reads and undoes the rotation as Turn.unrotate does."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.kernels.gather import gather_unrotated
from sglang_ext.kernels.scatter import scatter_rotated
from sglang_ext.rope import Turn
from tests.kernels.builders import DEVICE, dims, dtypes, few, on_device, paged_slots, rotation_to, seeds


@dataclass
class Case:
    """A pool that is NaN outside the slots, and the rotation to the positions they hold."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: torch.Tensor
    turn: Turn

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        return gather_unrotated(self.keys, self.values, self.slots, self.turn.table())


def case_of(count: int, layers: int, kv_heads: int, dim: int, rotary_dim: int, dtype: torch.dtype, seed: int) -> Case:
    (slots,), size = paged_slots([count], 4, seed)
    pools = []
    for layer in range(2 * layers):
        pool = torch.full((size, kv_heads, dim), torch.nan, device=DEVICE, dtype=dtype)
        pool[slots] = on_device(count, kv_heads, dim, seed=seed + layer, dtype=dtype)
        pools.append(pool)
    positions = torch.arange(seed, seed + count, device=DEVICE)
    return Case(pools[:layers], pools[layers:], slots, rotation_to(positions, rotary_dim))


@st.composite
def cases(draw, dtype: torch.dtype | None = None) -> Case:
    dim = draw(dims)
    return case_of(
        draw(st.integers(1, 70)), draw(st.integers(1, 3)), draw(st.integers(1, 3)), dim,
        draw(st.sampled_from([dim, dim // 2, dim // 4, 2])), dtype or draw(dtypes), draw(seeds),
    )  # fmt: skip


@few
@given(case=cases())
def test_it_equals_read_and_unrotate(case):
    keys, values = case.run()
    expected = case.turn.unrotate(torch.stack([pool[case.slots] for pool in case.keys]))
    assert (keys.dtype, values.dtype) == (torch.float32, case.values[0].dtype)
    torch.testing.assert_close(keys, expected, rtol=0, atol=2e-6)
    assert torch.equal(values, torch.stack([pool[case.slots] for pool in case.values]))


@few
@given(case=cases(dtype=torch.float32))
def test_what_scatter_wrote_comes_back(case):
    keys, values = case.run()
    back = (torch.zeros_like(case.keys[0]), torch.zeros_like(case.values[0]))
    scatter_rotated(keys[0], values[0], case.turn.table(), case.slots, *back)
    torch.testing.assert_close(back[0][case.slots], case.keys[0][case.slots], rtol=0, atol=3e-6)
    assert torch.equal(back[1][case.slots], case.values[0][case.slots])


@few
@given(case=cases(), data=st.data())
def test_the_order_of_slots_is_the_order_of_tokens(case, data):
    order = torch.tensor(data.draw(st.permutations(range(len(case.slots)))), device=DEVICE)
    keys, values = case.run()
    moved = gather_unrotated(case.keys, case.values, case.slots[order], case.turn.table()[order])
    assert torch.equal(moved[0], keys[:, order]) and torch.equal(moved[1], values[:, order])


def test_buffers_may_lie_with_gaps_and_are_not_mutated():
    case = case_of(37, 2, 2, 64, 32, torch.float32, 3)
    fused = [torch.cat([key, value], 1) for key, value in zip(case.keys, case.values)]
    held = [one.clone() for one in fused]
    keys, values = gather_unrotated(
        [one[:, :2] for one in fused], [one[:, 2:] for one in fused], case.slots, case.turn.table()
    )
    expected = case.run()
    assert torch.equal(keys, expected[0]) and torch.equal(values, expected[1])
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(held, fused))


def test_no_slots_give_an_empty_block():
    keys, values = case_of(0, 2, 3, 64, 64, torch.bfloat16, 0).run()
    assert keys.shape == values.shape == (2, 0, 3, 64)
