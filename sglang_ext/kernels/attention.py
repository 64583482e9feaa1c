"""Frontier-causal attention over a paged pool: many prompts, whatever their lengths, in one launch per layer.

Equals sglang_ext.attention.frontier_attention of each prompt over its gathered keys and values. What all
layers of a forward have in common is worked out once, on the host, as a TilePlan; a layer's launch then
copies nothing between host and device.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Sequence

import torch
import triton
import triton.language as tl

from sglang_ext.errors import GeometryError
from sglang_ext.kernels.shared import FLOATS, check, padded

ROWS = 64  # rows of a tile: pairs of a query and a head of the group, which share the keys that are read
WIDEST = 256  # the largest head_dim whose tiles fit into shared memory
LOG2_E = math.log2(math.e)  # the exponentials are taken to the base 2, which is what the device computes


class TilePlan(NamedTuple):
    """Who computes what in one forward. The S queries of all prompts lie back to back.

    tiles: int32 [tiles, 4], each the first query, the query after the last, where the prompt's slots
    begin, and the frontier (how many of the prompt's entries the tile reads); positions: int64 [S];
    slots: int64, the slot of every position of each prompt, back to back; group: query heads per KV head.
    """

    tiles: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    group: int


def plan_tiles(positions: Sequence[torch.Tensor], slots: Sequence[torch.Tensor], group: int) -> TilePlan:
    """Cuts each prompt's queries into tiles of at most ROWS // group, each with its own frontier.

    positions: per prompt int64 [S_b], at least one, ascending; slots: per prompt int64 [n_b], the slot of
    every position up to the last computed one at least. The positions are read on the host, once; the plan
    lies where the slots do. Raises GeometryError for positions that descend or have no slot.
    """
    if not 1 <= group <= ROWS:
        raise GeometryError(f"{group} query heads per KV head, expected 1 to {ROWS}")
    if not positions or len(positions) != len(slots):
        raise GeometryError(f"positions of {len(positions)} prompts and slots of {len(slots)}, expected one of each")
    for index, (own, held) in enumerate(zip(positions, slots)):
        check(f"positions of prompt {index}", own, (None,), (torch.int64,), positions[0].device)
        check(f"slots of prompt {index}", held, (None,), (torch.int64,), slots[0].device)
    packed = torch.cat(list(positions))
    tiles, query, begin = [], 0, 0
    for index, own in enumerate(packed.cpu().split([len(own) for own in positions])):
        _check_positions(index, own, len(slots[index]))
        first = torch.arange(0, len(own), ROWS // group)
        stop = (first + ROWS // group).clamp(max=len(own))
        tiles.append(torch.stack([query + first, query + stop, torch.full_like(first, begin), own[stop - 1] + 1], 1))
        query, begin = query + len(own), begin + len(slots[index])
    table = torch.cat(tiles)
    # The longest tiles start first, so that the launch does not end with one of them.
    table = table[table[:, 3].argsort(descending=True, stable=True)].to(torch.int32)
    device = slots[0].device
    return TilePlan(table.to(device), packed.to(device), torch.cat(list(slots)), group)


def _check_positions(index: int, positions: torch.Tensor, slots: int) -> None:
    if len(positions) == 0:
        raise GeometryError(f"prompt {index} has no position to compute: leave it out")
    if bool((positions.diff() < 0).any()):
        raise GeometryError(f"the positions of prompt {index} descend somewhere: sort them")
    if int(positions[0]) < 0 or int(positions[-1]) >= slots:
        raise GeometryError(
            f"prompt {index} computes positions {int(positions[0])} to {int(positions[-1])}, "
            f"but its slots are those of positions 0 to {slots - 1}"
        )


def frontier_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: TilePlan, scale: float
) -> torch.Tensor:
    """Attention of all computed positions of one layer, each over its own prompt's entries up to itself.

    query: [S, query_heads, D] in the plan's order; keys, values: the pool's buffers [slots, kv_heads, D]
    and [slots, kv_heads, Dv]; D and Dv up to WIDEST. Returns [S, query_heads, Dv] in the query's dtype.
    Softmax and sums run in float32; float32 operands multiply as three TF32 products, which keeps about
    float32's accuracy on tensor cores. Nothing is mutated. Raises GeometryError for tensors that do not fit
    each other or the plan.
    """
    kv_heads, dim, value_dim = _check(query, keys, values, plan)
    out = query.new_empty(*query.shape[:2], value_dim)
    cols, warps, stages = _tile_shape(max(padded(dim), padded(value_dim)) * query.element_size())
    _frontier[(len(plan.tiles), kv_heads)](
        query, keys, values, out, plan.tiles, plan.positions, plan.slots, scale * LOG2_E,
        *query.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out.stride()[:2],
        GROUP=plan.group, DIM=dim, VALUE_DIM=value_dim, DIM_TILE=padded(dim), VALUE_TILE=padded(value_dim),
        ROWS=ROWS, COLS=cols, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _check(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: TilePlan) -> tuple[int, int, int]:
    device = plan.slots.device
    check("keys", keys, (None, None, None), FLOATS, device)
    kv_heads, dim = keys.shape[1:]
    check("values", values, (len(keys), kv_heads, None), (keys.dtype,), device)
    check("query", query, (len(plan.positions), kv_heads * plan.group, dim), FLOATS, device)
    if max(dim, values.shape[-1]) > WIDEST:
        raise GeometryError(f"heads of {dim} and {values.shape[-1]} dimensions, expected at most {WIDEST}")
    return kv_heads, dim, values.shape[-1]


def _tile_shape(line: int) -> tuple[int, int, int]:
    """Entries per step, warps and pipeline stages for heads of `line` bytes.

    The largest that fit into shared memory; up to 16-bit heads of 256 none leaves the registers, on compute
    capabilities 8.0 and 9.0. float32 is there for comparisons, and may.
    """
    if line <= 256:
        return 64, 4 if line <= 128 else 8, 3
    return (32, 8, 2) if line <= 512 else (16, 8, 1)


@triton.jit
def _frontier(
    query, keys, values, out, tiles, positions, slots, scale,
    query_row, query_head, key_slot, key_head, value_slot, value_head, out_row, out_head,
    GROUP: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, DIM_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """A program computes one tile for one KV head and its group of query heads. scale is to the base 2."""
    tile = tiles + tl.program_id(0) * 4
    kv_head = tl.program_id(1)
    first, stop, begin, frontier = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)

    # The group is folded into the rows, so that keys are read once for all of its heads.
    row = tl.arange(0, ROWS)
    at = (first + row // GROUP).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    live = at < stop
    # A row without a query computes position 0 and is not stored.
    position = tl.load(positions + at, mask=live, other=0)
    dim, value_dim = tl.arange(0, DIM_TILE), tl.arange(0, VALUE_TILE)
    from_query = query + at[:, None] * query_row + head[:, None] * query_head + dim[None, :]
    q = tl.load(from_query, mask=live[:, None] & (dim < DIM)[None, :], other=0.0)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_TILE], tl.float32)
    for start in tl.range(0, frontier, COLS):
        entry = start + tl.arange(0, COLS)
        inside = entry < frontier
        slot = tl.load(slots + begin + entry, mask=inside, other=0)
        from_keys = keys + slot[None, :] * key_slot + kv_head * key_head + dim[:, None]
        k = tl.load(from_keys, mask=inside[None, :] & (dim < DIM)[:, None], other=0.0).to(q.dtype)
        logits = tl.dot(q, k, input_precision="tf32x3") * scale
        logits = tl.where(entry[None, :] <= position[:, None], logits, float("-inf"))

        # Entry 0 is seen by every row, so that `highest` is finite from the first step on.
        highest = tl.maximum(largest, tl.max(logits, 1))
        weight = tl.exp2(logits - highest[:, None])
        shrink = tl.exp2(largest - highest)
        total = total * shrink + tl.sum(weight, 1)
        from_values = values + slot[:, None] * value_slot + kv_head * value_head + value_dim[None, :]
        v = tl.load(from_values, mask=inside[:, None] & (value_dim < VALUE_DIM)[None, :], other=0.0).to(q.dtype)
        mixed = tl.dot(weight.to(q.dtype), v, mixed * shrink[:, None], input_precision="tf32x3")
        largest = highest

    to = out + at[:, None] * out_row + head[:, None] * out_head + value_dim[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(to, mixed, mask=live[:, None] & (value_dim < VALUE_DIM)[None, :])
