"""Laws of frontier-causal attention: a query sees all entries up to its own position, and only those."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from sglang_ext.attention import frontier_attention
from tests.kv.builders import laws, random


@dataclass
class Case:
    query: torch.Tensor
    positions: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    scale: float = 0.37

    def run(self, **changes) -> torch.Tensor:
        given = {**vars(self), **{k: v for k, v in changes.items() if k != "block"}}
        return frontier_attention(**given, block=changes.get("block", 64))


@st.composite
def cases(draw, everything: bool = False) -> Case:
    length = draw(st.integers(1, 40))
    kv_heads, group, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([2, 4, 8]))
    chosen = set(range(length)) if everything else draw(st.sets(st.integers(0, length - 1), min_size=1))
    seed = draw(st.integers(0, 999))
    return Case(
        query=random(seed, len(chosen), kv_heads * group, head_dim),
        positions=torch.tensor(sorted(chosen)),
        keys=random(seed + 1, length, kv_heads, head_dim),
        values=random(seed + 2, length, kv_heads, head_dim),
    )


def dense(case: Case) -> torch.Tensor:
    """Written out in float64: one softmax per query and head over the positions it may see."""
    rows, heads, _ = case.query.shape
    group = heads // case.keys.shape[1]
    keys = case.keys.double().repeat_interleave(group, 1)
    values = case.values.double().repeat_interleave(group, 1)
    scores = torch.einsum("shd,thd->hst", case.query.double(), keys) * case.scale
    hidden = torch.arange(len(keys)) > case.positions[:, None]
    return torch.einsum("hst,thd->shd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values).float()


@laws
@given(case=cases(), block=st.sampled_from([1, 2, 3, 7, 64]))
def test_it_equals_a_dense_masked_softmax(case, block):
    torch.testing.assert_close(case.run(block=block), dense(case), rtol=0, atol=3e-6)


@laws
@given(case=cases(everything=True))
def test_over_all_positions_it_is_ordinary_causal_attention(case):
    query, keys, values = (t.transpose(0, 1)[None] for t in (case.query, case.keys, case.values))
    ordinary = scaled_dot_product_attention(query, keys, values, is_causal=True, scale=case.scale, enable_gqa=True)
    torch.testing.assert_close(case.run(), ordinary[0].transpose(0, 1), rtol=0, atol=3e-6)


@laws
@given(case=cases(), block=st.sampled_from([1, 3, 64]), data=st.data())
def test_a_later_entry_changes_no_earlier_query(case, block, data):
    at = data.draw(st.integers(0, len(case.keys) - 1))
    keys, values = case.keys.clone(), case.values.clone()
    keys[at:] = random(5, *keys[at:].shape) * 30
    values[at:] = random(6, *values[at:].shape) * 30
    earlier = case.positions < at
    before, after = case.run(block=block), case.run(keys=keys, values=values, block=block)
    assert torch.equal(before[earlier], after[earlier])


@laws
@given(case=cases(), data=st.data())
def test_every_entry_up_to_its_position_reaches_a_query(case, data):
    row = data.draw(st.integers(0, len(case.positions) - 1))
    at = data.draw(st.integers(0, int(case.positions[row])))
    values = case.values.clone()
    values[at] += 50
    moved = (case.run(values=values) - case.run())[row]
    assert bool((moved > 0).all())


@laws
@given(case=cases(), block=st.sampled_from([2, 5, 64]))
def test_one_by_one_equals_all_at_once(case, block):
    one_by_one = [
        case.run(query=case.query[i : i + 1], positions=case.positions[i : i + 1]) for i in range(len(case.positions))
    ]
    torch.testing.assert_close(torch.cat(one_by_one), case.run(block=block), rtol=0, atol=3e-6)


@laws
@given(case=cases(), seed=st.integers(0, 99))
def test_the_physical_order_of_slots_does_not_matter(case, seed):
    length = len(case.keys)
    slots = torch.randperm(length + 5, generator=torch.Generator().manual_seed(seed))[:length]
    pool = torch.full((2, length + 5, *case.keys.shape[1:]), torch.nan)
    pool[0, slots], pool[1, slots] = case.keys, case.values
    assert torch.equal(case.run(keys=pool[0, slots], values=pool[1, slots]), case.run())


def test_entries_past_the_last_query_are_never_read():
    case = Case(random(0, 2, 2, 4), torch.tensor([1, 3]), random(1, 9, 1, 4), random(2, 9, 1, 4))
    keys, values = case.keys.clone(), case.values.clone()
    keys[4:] = values[4:] = torch.nan
    assert torch.equal(case.run(keys=keys, values=values), case.run())


def test_the_first_position_sees_itself_alone():
    case = Case(random(0, 1, 4, 4), torch.tensor([0]), random(1, 6, 2, 4), random(2, 6, 2, 4))
    torch.testing.assert_close(case.run()[0], case.values[0].repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_output_has_the_querys_dtype_and_the_values_width(dtype):
    query, keys = random(0, 3, 4, 8).to(dtype), random(1, 5, 2, 8)
    values = random(2, 5, 2, 6)
    out = frontier_attention(query, torch.tensor([0, 2, 4]), keys, values, 0.5)
    assert (out.dtype, tuple(out.shape)) == (dtype, (3, 4, 6))


def test_nothing_is_mutated():
    case = Case(random(0, 3, 4, 4), torch.tensor([0, 2, 4]), random(1, 5, 2, 4), random(2, 5, 2, 4))
    before = [t.clone() for t in (case.query, case.positions, case.keys, case.values)]
    case.run(block=2)
    assert all(map(torch.equal, before, (case.query, case.positions, case.keys, case.values)))


@pytest.mark.parametrize(
    ("positions", "length"),
    [
        (range(1100), 1100),  # computed whole: torch's own causal attention
        (range(1100), 1500),  # whole so far, more entries behind
        (range(400, 1500), 1500),  # behind a prefix
        (sorted({*range(0, 2000, 2), *range(0, 2000, 3), *range(0, 2000, 5), 1999}), 2000),  # the large block
        (range(0, 2000, 7), 2000),  # the small one
    ],
)
def test_whatever_way_is_taken_for_long_prompts_it_is_the_same_attention(positions, length):
    positions = torch.tensor(list(positions))
    case = Case(random(0, len(positions), 2, 4), positions, random(1, length, 1, 4), random(2, length, 1, 4))
    torch.testing.assert_close(case.run(block=None), case.run(block=64), rtol=0, atol=3e-6)
    last = int(positions[-1])
    case.keys[last + 1 :] = case.values[last + 1 :] = torch.nan
    assert bool(torch.isfinite(case.run(block=None)).all()), "an entry past the last query was read"
