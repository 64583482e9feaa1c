"""Rotates keys to their positions and writes them, with their values, into slots of a paged pool, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_ext.kernels.shared import FLOATS, TOKENS, check, check_rotation, padded, pair_of, rotation_of


def scatter_rotated(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> None:
    """Writes one layer's position-free entries to `slots`, keys rotated, in the pool's dtype.

    keys, values: float32 [n, kv_heads, head_dim]; table: Turn.table() of their positions, float32
    [n, rotary_dim]; slots: int64 [n], all different; key_buffer, value_buffer: the layer's buffers
    [slots, kv_heads, head_dim], mutated at `slots` and nowhere else. Equals Turn.rotate followed by
    Pool.write. Raises GeometryError for tensors that do not fit together.
    """
    count, kv_heads, head_dim = _check(keys, values, table, slots, key_buffer, value_buffer)
    if count == 0:
        return
    _scatter[(triton.cdiv(count, TOKENS), kv_heads)](
        keys, values, table, slots, key_buffer, value_buffer, count,
        *keys.stride()[:2], *values.stride()[:2], *key_buffer.stride()[:2], *value_buffer.stride()[:2],
        HALF=table.shape[1] // 2, DIM=head_dim, DIM_TILE=padded(head_dim), TOKENS=TOKENS,
    )  # fmt: skip


def _check(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    slots: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
) -> torch.Size:
    device = slots.device
    check("slots", slots, (None,), (torch.int64,), device)
    check("keys", keys, (len(slots), None, None), (torch.float32,), device)
    check("values", values, keys.shape, (torch.float32,), device)
    check("the key buffer", key_buffer, (None, *keys.shape[1:]), FLOATS, device)
    check("the value buffer", value_buffer, (None, *keys.shape[1:]), (key_buffer.dtype,), device)
    check_rotation(table, len(slots), keys.shape[-1], device)
    return keys.shape


# The counts differ from prompt to prompt: a variant of the kernel for some of them would be compiled inside a request.
@triton.jit(do_not_specialize=["count"])
def _scatter(
    keys, values, table, slots, key_buffer, value_buffer, count,
    key_token, key_head, value_token, value_head, to_key_slot, to_key_head, to_value_slot, to_value_head,
    HALF: tl.constexpr, DIM: tl.constexpr, DIM_TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A program moves TOKENS tokens of one head."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM_TILE)
    mask = (token < count)[:, None] & (dim < DIM)[None, :]
    slot = tl.load(slots + token, mask=token < count, other=0)[:, None]

    own, pair = rotation_of(table, token, dim, mask, HALF)
    line = keys + token[:, None] * key_token + head * key_head
    key = tl.load(line + dim[None, :], mask=mask, other=0.0)
    other = tl.load(line + pair_of(dim, HALF)[None, :], mask=mask, other=0.0)
    turned = (key * own + other * pair).to(key_buffer.dtype.element_ty)
    tl.store(key_buffer + slot * to_key_slot + head * to_key_head + dim[None, :], turned, mask=mask)

    value = tl.load(values + token[:, None] * value_token + head * value_head + dim[None, :], mask=mask, other=0.0)
    to = value_buffer + slot * to_value_slot + head * to_value_head + dim[None, :]
    tl.store(to, value.to(value_buffer.dtype.element_ty), mask=mask)
