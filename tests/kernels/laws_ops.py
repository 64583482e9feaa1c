"""Laws of the worker's operations: a whole lift is the same whether torch or Triton computes it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import CrossModelMap, SideMap
from sglang_ext.worker.ops import Buffers, KVOps, TorchOps
from sglang_ext.worker.triton_ops import TritonOps
from tests.kernels.builders import DEVICE, on_device, paged_slots
from tests.kv.builders import identity
from tests.transfer.conftest import SOURCE, TARGET, random_maps

GROUP = TARGET.query_heads // TARGET.kv_heads
COMPUTED = [torch.arange(41)[::3], torch.tensor([2, 5, 6, 69])]  # of each prompt; the first is a view
LENGTHS = [41, 70]
STARTS = [0, 7]  # where each prompt's lift begins, behind native KV
ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 4e-2}


@dataclass
class Lifted:
    """What a lift leaves behind, prompt by prompt or layer by layer."""

    blocks: list[KVBlock]
    scores: list[torch.Tensor]
    pool: list[Buffers]
    mixed: list[torch.Tensor]
    received: list[torch.Tensor]


def pool_of(geometry: KVGeometry, slots: list[torch.Tensor], size: int, dtype: torch.dtype, seed: int) -> list[Buffers]:
    """NaN wherever no prompt has a slot."""
    pool = []
    for layer in range(geometry.layers):
        sides = [
            torch.full((size, geometry.kv_heads, geometry.head_dim), torch.nan, device=DEVICE, dtype=dtype)
            for _ in "kv"
        ]
        for n, side in enumerate(sides):
            own = torch.cat(slots)
            side[own] = on_device(len(own), *side.shape[1:], seed=seed + 2 * layer + n, dtype=dtype)
        pool.append((sides[0], sides[1]))
    return pool


def maps_of(structure: str, dtype: torch.dtype) -> CrossModelMap:
    def placed(one: SideMap) -> SideMap:
        parts = {name: getattr(one, name).to(DEVICE) for name in ("bias", "input_mean", "basis")}
        return replace(one, weight=one.weight.to(DEVICE, dtype), **parts)

    layers = random_maps(structure=structure).layers
    return CrossModelMap(tuple({side: placed(one) for side, one in sides.items()} for sides in layers))


def lift(ops: KVOps, structure: str, dtype: torch.dtype) -> Lifted:
    """Both prompts: read at the source, mapped, written behind their native KV, and attended over in one batch."""
    slots, size = paged_slots(LENGTHS, 4, seed=1)
    source, target = (pool_of(one, slots, size, dtype, seed) for one, seed in ((SOURCE, 10), (TARGET, 30)))
    maps, blocks, scores = maps_of(structure, dtype), [], []
    for own, start in zip(slots, STARTS):
        positions = torch.arange(len(own), device=DEVICE)
        keys, values = ops.read(source, own, Rotation(SOURCE.rope, DEVICE).at(positions))
        block = KVBlock(torch.arange(len(own)), keys, values, SOURCE, identity())
        write = ops.writer(Rotation(TARGET.rope, DEVICE).at(positions[start:]), own[start:])
        shape = (len(own) - start, TARGET.kv_heads, TARGET.head_dim)
        for layer, mapped_keys, mapped_values, outside in maps.predict(block, Phases(), ops.map_side):
            write(mapped_keys[start:].view(shape), mapped_values[start:].view(shape), *target[layer])
            scores.append(outside)
        blocks.append(block)
    attention, mixed, received = ops.attention(COMPUTED, slots, GROUP), [], []
    for layer, buffers in enumerate(target):
        query = on_device(sum(map(len, COMPUTED)), TARGET.query_heads, TARGET.head_dim, seed=50 + layer, dtype=dtype)
        alone = attention(query, *buffers, 0.3)
        mixed.append(attention(query, *buffers, 0.3, received))
        assert torch.equal(alone, mixed[-1])  # to be asked what was received changes nothing
    return Lifted(blocks, scores, target, mixed, received)


@pytest.mark.parametrize("structure", ["full", "head"])
@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_lift_is_the_same_in_triton_as_in_torch(dtype, structure):
    ours, theirs = lift(TritonOps(), structure, dtype), lift(TorchOps(), structure, dtype)
    rounding = ROUNDING[dtype]

    def assert_equal(one: torch.Tensor, other: torch.Tensor) -> None:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding, equal_nan=True)

    for one, other in zip(ours.blocks, theirs.blocks, strict=True):
        assert_equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
    for one, other in zip(ours.pool, theirs.pool, strict=True):
        assert_equal(one[0], other[0])
        assert_equal(one[1], other[1])
    for name in ("mixed", "received"):
        for one, other in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert_equal(one, other)
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        # A score is a difference of two energies, so that its error is relative to them.
        torch.testing.assert_close(one, other, rtol=rounding, atol=rounding * float(other.max()))


@pytest.mark.parametrize("ops", [TorchOps(), TritonOps()], ids=lambda ops: ops.name)
def test_native_entries_before_the_start_and_foreign_slots_are_left_alone(ops):
    slots, size = paged_slots(LENGTHS, 4, seed=1)
    before, after = pool_of(TARGET, slots, size, torch.float32, 30), lift(ops, "full", torch.float32).pool
    written = torch.zeros(size, dtype=torch.bool, device=DEVICE)
    for own, start in zip(slots, STARTS):
        written[own[start:]] = True
    for old, new in zip(before, after, strict=True):
        for one, other in zip(old, new):
            changed = (one.nan_to_num(9.0) != other.nan_to_num(9.0)).flatten(1).any(1)
            assert torch.equal(changed, written)
