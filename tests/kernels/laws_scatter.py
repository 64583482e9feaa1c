"""Laws of the scatter kernel: it writes what Turn.rotate and Pool.write write, at the given slots and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.kernels.scatter import scatter_rotated
from sglang_ext.rope import Turn
from tests.kernels.builders import DEVICE, dims, dtypes, few, on_device, paged_slots, rotation_to, seeds

ROUNDING = {torch.float32: 0.0, torch.bfloat16: 2**-7, torch.float16: 2**-10}  # one unit in the last place


@dataclass
class Case:
    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    turn: Turn
    pool: tuple[torch.Tensor, torch.Tensor]

    def run(self) -> None:
        scatter_rotated(self.keys, self.values, self.turn.table(), self.slots, *self.pool)


def case_of(count: int, kv_heads: int, dim: int, rotary_dim: int, dtype: torch.dtype, seed: int) -> Case:
    (slots,), size = paged_slots([count], 4, seed)
    pool = tuple(on_device(size, kv_heads, dim, seed=seed + i, dtype=dtype) for i in (2, 3))
    return Case(
        on_device(count, kv_heads, dim, seed=seed), on_device(count, kv_heads, dim, seed=seed + 1), slots,
        rotation_to(torch.arange(seed, seed + count, device=DEVICE), rotary_dim), pool,
    )  # fmt: skip


@st.composite
def cases(draw) -> Case:
    dim = draw(dims)
    rotary_dim = draw(st.sampled_from([dim, dim // 2, dim // 4, 2]))
    return case_of(draw(st.integers(1, 70)), draw(st.integers(1, 3)), dim, rotary_dim, draw(dtypes), draw(seeds))


@few
@given(case=cases())
def test_it_equals_rotate_and_write(case):
    case.run()
    keys, values = (buffer[case.slots] for buffer in case.pool)
    rounding = ROUNDING[keys.dtype]
    expected = case.turn.rotate(case.keys)
    torch.testing.assert_close(keys.float(), expected.to(keys.dtype).float(), rtol=rounding, atol=2e-6)
    assert torch.equal(values, case.values.to(values.dtype))


@few
@given(case=cases())
def test_no_other_slot_is_written(case):
    before = [buffer.clone() for buffer in case.pool]
    case.run()
    others = torch.ones(len(before[0]), dtype=torch.bool, device=DEVICE)
    others[case.slots] = False
    assert all(torch.equal(a[others], b[others]) for a, b in zip(before, case.pool))


@few
@given(case=cases(), data=st.data())
def test_a_span_of_the_tokens_writes_the_same(case, data):
    start = data.draw(st.integers(0, len(case.slots)))
    whole, part = ([buffer.clone() for buffer in case.pool] for _ in range(2))
    table = case.turn.table()
    scatter_rotated(case.keys, case.values, table, case.slots, *whole)
    scatter_rotated(case.keys[start:], case.values[start:], table[start:], case.slots[start:], *part)
    own = case.slots[start:]
    assert all(torch.equal(a[own], b[own]) for a, b in zip(whole, part))
    assert all(torch.equal(a[case.slots[:start]], b[case.slots[:start]]) for a, b in zip(case.pool, part))


def test_buffers_may_lie_with_gaps():
    case = case_of(37, 2, 64, 32, torch.bfloat16, 3)
    fused = torch.cat(case.pool, 1)
    scatter_rotated(case.keys, case.values, case.turn.table(), case.slots, fused[:, :2], fused[:, 2:])
    case.run()
    assert torch.equal(fused, torch.cat(case.pool, 1))
