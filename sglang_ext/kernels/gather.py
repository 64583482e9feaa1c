"""Reads KV out of a paged pool and undoes the rotation of its keys, in one pass per layer."""

from __future__ import annotations

from typing import Sequence

import torch
import triton
import triton.language as tl

from sglang_ext.errors import GeometryError
from sglang_ext.kernels.shared import FLOATS, TOKENS, check, check_rotation, padded, pair_of, rotation_of


def gather_unrotated(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Position-free keys and values of n slots of all layers.

    keys, values: the pool's buffers, one [slots, kv_heads, head_dim] per layer; slots: int64 [n]; table:
    Turn.table() of the positions that the slots hold, float32 [n, rotary_dim]. Returns keys in float32 and
    values in the pool's dtype, [layers, n, kv_heads, head_dim] each. Nothing is mutated. Equals Pool.read
    followed by Turn.unrotate. Raises GeometryError for buffers that do not fit together.
    """
    _check(keys, values, slots, table)
    count, (kv_heads, head_dim) = len(slots), keys[0].shape[1:]
    shape = (len(keys), count, kv_heads, head_dim)
    out_keys = torch.empty(shape, dtype=torch.float32, device=slots.device)
    out_values = values[0].new_empty(shape)
    if count == 0:
        return out_keys, out_values
    for layer, (key, value) in enumerate(zip(keys, values)):
        _gather[(triton.cdiv(count, TOKENS), kv_heads)](
            key, value, slots, table, out_keys[layer], out_values[layer], count,
            *key.stride()[:2], *value.stride()[:2], *out_keys.stride()[1:3],
            HALF=table.shape[1] // 2, DIM=head_dim, DIM_TILE=padded(head_dim), TOKENS=TOKENS,
        )  # fmt: skip
    return out_keys, out_values


def _check(
    keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: torch.Tensor, table: torch.Tensor
) -> None:
    if not keys or len(keys) != len(values):
        raise GeometryError(f"{len(keys)} key buffers and {len(values)} value buffers, expected one of each per layer")
    shape, device = keys[0].shape, slots.device
    check("the key buffer of layer 0", keys[0], (None, None, None), FLOATS, device)
    for side, buffers in (("key", keys), ("value", values)):
        for layer, buffer in enumerate(buffers):
            check(f"the {side} buffer of layer {layer}", buffer, (None, *shape[1:]), (keys[0].dtype,), device)
    check("slots", slots, (None,), (torch.int64,), device)
    check_rotation(table, len(slots), shape[-1], device)


# The counts differ from prompt to prompt: a variant of the kernel for some of them would be compiled inside a request.
@triton.jit(do_not_specialize=["count"])
def _gather(
    keys, values, slots, table, out_keys, out_values, count,
    key_slot, key_head, value_slot, value_head, out_token, out_head,
    HALF: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program moves TOKENS tokens of one head and layer."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_TILE)
    mask = (token < count)[:, None] & (dim < DIM)[None, :]
    slot = tl.load(slots + token, mask=token < count, other=0)[:, None]

    own, pair = rotation_of(table, token, dim, mask, HALF)
    line = keys + slot * key_slot + head * key_head
    key = tl.load(line + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(line + pair_of(dim, HALF)[None, :], mask=mask, other=0.0).to(tl.float32)
    # The inverse of a rotation scaled by c is its transpose over c^2, and the table's own factors give c^2.
    free = (key * own - other * pair) / (own * own + pair * pair)

    to = token[:, None] * out_token + head * out_head + dim[None, :]
    tl.store(out_keys + to, free, mask=mask)
    value = tl.load(values + slot * value_slot + head * value_head + dim[None, :], mask=mask, other=0.0)
    tl.store(out_values + to, value, mask=mask)
