"""Laws of the attention kernel: each prompt's queries see its own entries up to their position, in any company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext import attention as in_torch
from sglang_ext.kernels.attention import frontier_attention, plan_tiles
from tests.kernels.builders import DEVICE, dims, few, on_device, paged_slots, seeds

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass
class Case:
    """Queries and positions per prompt; a pool that is NaN wherever no prompt has an entry."""

    queries: list[torch.Tensor]
    positions: list[torch.Tensor]
    slots: list[torch.Tensor]
    keys: torch.Tensor
    values: torch.Tensor
    scale: float = 0.11

    def run(self) -> list[torch.Tensor]:
        query = torch.cat(self.queries)
        plan = plan_tiles(self.positions, self.slots, query.shape[1] // self.keys.shape[1])
        out = frontier_attention(query, self.keys, self.values, plan, self.scale)
        return list(out.split([len(one) for one in self.queries]))

    def run_in_torch(self) -> list[torch.Tensor]:
        """In float32, so that only the kernel rounds."""
        return [
            in_torch.frontier_attention(
                query.float(), positions, self.keys[slots].float(), self.values[slots].float(), self.scale
            )
            for query, positions, slots in zip(self.queries, self.positions, self.slots)
        ]

    def only(self, *prompts: int) -> Case:
        chosen = {name: [getattr(self, name)[i] for i in prompts] for name in ("queries", "positions", "slots")}
        return replace(self, **chosen)


def case_of(
    chosen: list[list[int]], lengths: list[int], kv_heads: int = 2, group: int = 2, dim: int = 64, value_dim: int = 64,
    dtype: torch.dtype = torch.float32, page: int = 1, seed: int = 0,
) -> Case:  # fmt: skip
    slots, size = paged_slots(lengths, page, seed)
    keys = torch.full((size, kv_heads, dim), torch.nan, device=DEVICE, dtype=dtype)
    values = torch.full((size, kv_heads, value_dim), torch.nan, device=DEVICE, dtype=dtype)
    for prompt, own in enumerate(slots):
        keys[own] = on_device(len(own), kv_heads, dim, seed=seed + 2 * prompt, dtype=dtype)
        values[own] = on_device(len(own), kv_heads, value_dim, seed=seed + 2 * prompt + 1, dtype=dtype)
    positions = [torch.tensor(own, device=DEVICE) for own in chosen]
    queries = [
        on_device(len(own), kv_heads * group, dim, seed=seed + 50 + i, dtype=dtype) for i, own in enumerate(chosen)
    ]
    return Case(queries, positions, slots, keys, values)


@st.composite
def cases(draw, dtype: torch.dtype | None = None) -> Case:
    lengths = draw(st.lists(st.integers(1, 130), min_size=1, max_size=3))
    chosen = [sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n))) for n in lengths]
    return case_of(
        chosen, lengths, kv_heads=draw(st.integers(1, 3)), group=draw(st.integers(1, 8)), dim=draw(dims),
        value_dim=draw(dims), dtype=dtype or draw(st.sampled_from(list(TOLERANCE))),
        page=draw(st.sampled_from([1, 4, 16])), seed=draw(seeds),
    )  # fmt: skip


def assert_equals_torch(case: Case) -> None:
    for ours, theirs in zip(case.run(), case.run_in_torch(), strict=True):
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=TOLERANCE[case.keys.dtype])


@few
@given(case=cases())
def test_it_equals_the_torch_version_of_each_prompt(case):
    assert_equals_torch(case)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_every_geometry(dim, dtype):
    """A prefix of 60 with a sparse and a dense stretch behind it: several tiles of rows and of columns."""
    assert_equals_torch(case_of([[60, 64, 70, *range(100, 130)]], [131], kv_heads=1, group=7, dim=dim, dtype=dtype))


@pytest.mark.parametrize(
    "chosen, lengths",
    [
        ([[0]], [1]),  # one query, one position
        ([[0]], [90]),  # it sees itself alone
        ([[89]], [90]),  # the whole prefix is cached
        ([list(range(70))], [70]),  # nothing is: plain causal prefill
        ([[0], list(range(0, 300, 2)), [5, 200]], [1, 300, 201]),  # very different lengths in one launch
        ([[3, 3, 9]], [10]),  # a position twice
    ],
)
def test_the_edges(chosen, lengths):
    assert_equals_torch(case_of(chosen, lengths))


@few
@given(case=cases(), data=st.data())
def test_a_later_entry_changes_no_earlier_query(case, data):
    prompt = data.draw(st.integers(0, len(case.slots) - 1))
    at = data.draw(st.integers(0, len(case.slots[prompt]) - 1))
    before = case.run()
    later = case.slots[prompt][at:]
    case.keys[later], case.values[later] = 30.0, -30.0
    earlier = case.positions[prompt] < at
    after = case.run()
    assert torch.equal(before[prompt][earlier], after[prompt][earlier])
    assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(before, after)) if i != prompt)


@pytest.mark.parametrize("last", [0, 62, 63, 64, 99])
def test_entries_behind_the_last_query_are_never_read(last):
    case = case_of([sorted({0, last}), [last]], [200, 100])
    before = case.run()
    for positions, slots in zip(case.positions, case.slots):
        unseen = slots[int(positions[-1]) + 1 :]
        case.keys[unseen] = case.values[unseen] = torch.nan
    assert all(map(torch.equal, before, case.run()))


@few
@given(case=cases(dtype=torch.float32), data=st.data())
def test_every_entry_up_to_its_position_reaches_a_query(case, data):
    prompt = data.draw(st.integers(0, len(case.slots) - 1))
    row = data.draw(st.integers(0, len(case.positions[prompt]) - 1))
    at = data.draw(st.integers(0, int(case.positions[prompt][row])))
    before = case.run()[prompt][row]
    case.values[case.slots[prompt][at]] += 1e5
    assert bool((case.run()[prompt][row] > before).all())


@few
@given(case=cases(), data=st.data())
def test_neither_the_batch_nor_its_order_matters(case, data):
    together = case.run()
    order = data.draw(st.permutations(range(len(together))))
    for prompt, one in zip(order, case.only(*order).run()):
        assert torch.equal(one, together[prompt])
        assert torch.equal(case.only(prompt).run()[0], together[prompt])


def test_a_float32_query_reads_a_bfloat16_pool():
    case = case_of([[2, 40]], [41])
    case.keys, case.values = case.keys.bfloat16(), case.values.bfloat16()
    for ours, theirs in zip(case.run(), case.run_in_torch(), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_inputs_may_lie_with_gaps_and_are_not_mutated():
    """A fused projection's output: query, key and value heads side by side."""
    case = case_of([[1, 5, 30]], [33])
    fused = torch.cat([case.keys, case.values], 1)
    case.keys, case.values = fused[:, :2], fused[:, 2:]
    wide = torch.cat([case.queries[0], case.queries[0]], 1)
    held = [t.clone() for t in (fused, wide)]
    plan = plan_tiles(case.positions, case.slots, 2)
    ours = frontier_attention(wide[:, :4], case.keys, case.values, plan, case.scale)
    torch.testing.assert_close(ours, case.run_in_torch()[0], rtol=0, atol=1e-5)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(held, (fused, wide)))
