"""What the kernels share: checks at the edge, sizes of tiles, and the rotation of a head's pairs."""

from __future__ import annotations

from typing import Sequence

import torch
import triton
import triton.language as tl

from sglang_ext.errors import GeometryError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_TILE = 16  # the least rows and columns that tensor cores multiply
TOKENS = 32  # tokens of one head that a program of the two memory-bound kernels moves


def check(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> None:
    """Raises GeometryError unless a tensor has this shape (None: any size), one of these dtypes and this device.

    The last dimension must lie without gaps, because kernels read along it.
    """
    sizes = list(tensor.shape)
    fits = len(sizes) == len(shape) and all(want in (None, have) for have, want in zip(sizes, shape))
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise GeometryError(f"{name} has shape {sizes}, expected [{wanted}]")
    if tensor.dtype not in dtypes:
        raise GeometryError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise GeometryError(f"{name} is on {tensor.device}, expected {device} as the other tensors")
    if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise GeometryError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension, expected 1: make it contiguous"
        )


def check_rotation(table: torch.Tensor, tokens: int, head_dim: int, device: torch.device) -> None:
    """Raises GeometryError unless `table` is Turn.table() of so many positions and fits into a head."""
    check("the rotation table", table, (tokens, None), (torch.float32,), device)
    width = table.shape[1]
    if width < 2 or width % 2 or width > head_dim or not table.is_contiguous():
        raise GeometryError(
            f"the rotation table has width {width}, strides {table.stride()}; expected Turn.table() of an even "
            f"rotary_dim of at most head_dim = {head_dim}"
        )


def padded(size: int) -> int:
    """The next power of two, at least SMALLEST_TILE: the extent of a tile that holds `size` values."""
    return max(SMALLEST_TILE, triton.next_power_of_2(size))


@triton.jit
def pair_of(dim, HALF: tl.constexpr):
    """The other dimension of each one's rotary pair (half-split), and itself behind rotary_dim = 2 HALF."""
    other = tl.where(dim < HALF, dim + HALF, dim - HALF)
    return tl.where(dim < 2 * HALF, other, dim)


@triton.jit
def rotation_of(table, token, dim, mask, HALF: tl.constexpr):
    """Factors of a dimension and of its pair in the rotated key: float32 [tokens, dims] each.

    table: Turn.table(), float32 [T, 2 HALF]. Behind rotary_dim they are 1 and 0.
    """
    rotary = mask & (dim < 2 * HALF)[None, :]
    at = table + token[:, None] * (2 * HALF) + (dim % HALF)[None, :]
    cos = tl.load(at, mask=rotary, other=1.0)
    sin = tl.load(at + HALF, mask=rotary, other=0.0)
    return cos, tl.where((dim < HALF)[None, :], -sin, sin)
