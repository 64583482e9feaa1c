"""The map of one side of one target layer, and its tokens' rank disagreement, without a second pass over the output.

With z = (x - x-bar) W, the entry is y-hat = z + mu-hat (equation 1) and its share of the score is
||z||^2 - ||z V_r||^2 (equation 9). A program holds a block of tokens and walks over columns of W: each tile
of z is stored, squared and multiplied into z V_r while it is in registers. Where the tokens alone do not
fill the device, several programs share the columns; a second, small launch adds up their parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sglang_ext.errors import GeometryError
from sglang_ext.kernels.shared import FLOATS, SMALLEST_TILE, check, padded

PROGRAMS = 128  # as many as a data-centre GPU has multiprocessors, about
RANKS = 128  # up to this rank a tile of z V_r stays in registers beside the tile of z; beyond it, tiles are smaller
LARGEST_RANK = 1024


def map_and_score(
    features: torch.Tensor,
    weight: torch.Tensor,
    prediction_mean: torch.Tensor,
    basis: torch.Tensor,
    scores: torch.Tensor,
    sources: int,
) -> torch.Tensor:
    """Predicted entries y-hat, float32 [T, d_t]; adds each token's energy outside V_r to `scores`, float32 [T].

    features: centred, x - x-bar, [T, k * d_s]; weight: in their dtype, [k * d_s, d_t] (structure `full`) or
    [kv_heads, k * source head_dim, target head_dim] (`head`); prediction_mean: mu-hat, float32 [d_t]; basis:
    V_r, float32 [d_t, r], r up to LARGEST_RANK or d_t; sources: k. Mutates `scores` alone. Equals
    SideMap.project plus mu-hat, and SideMap.disagreement: the energy is never below 0, and exactly 0 where
    r = d_t. Raises GeometryError for tensors that do not fit together.

    Products accumulate in float32. float32 operands multiply as three TF32 products, which keeps about
    float32's accuracy on tensor cores; z V_r of the other dtypes multiplies as three bfloat16 products.
    """
    blocks = weight[None] if weight.dim() == 2 else weight
    _check(features, blocks, prediction_mean, basis, scores, sources)
    (heads, inputs, width), (count, rank) = blocks.shape, (len(features), basis.shape[1])
    spanned = rank == len(basis)  # then there is nothing outside V_r
    entries = torch.empty(count, heads * width, dtype=torch.float32, device=features.device)
    if count == 0:
        return entries
    size = _tile_sizes(count, blocks, 0 if spanned else rank)
    energy = entries.new_empty(size.shares, count)
    inside = entries.new_empty(size.shares, count, 0 if spanned else rank)
    _map[(triton.cdiv(count, size.tokens), size.shares)](
        features, blocks, prediction_mean, basis, entries, energy, inside, count, size.per_share,
        features.stride(0), *blocks.stride()[:2], basis.stride(0),
        HEADS=heads, INPUTS=inputs, SOURCE_DIM=inputs // sources, WIDTH=width, RANK=inside.shape[2],
        RANK_TILE=padded(inside.shape[2]), TOKENS=size.tokens, COLUMNS=size.columns, STEP=size.step,
        PRECISION="tf32x3" if weight.dtype == torch.float32 else "bf16x3", num_warps=size.warps, num_stages=size.stages,
    )  # fmt: skip
    if not spanned:
        _add_energy[(triton.cdiv(count, SMALLEST_TILE),)](
            energy, inside, scores, count, size.shares,
            RANK=rank, RANK_TILE=padded(rank), TOKENS=SMALLEST_TILE,
        )  # fmt: skip
    return entries


def _check(
    features: torch.Tensor,
    blocks: torch.Tensor,
    prediction_mean: torch.Tensor,
    basis: torch.Tensor,
    scores: torch.Tensor,
    sources: int,
) -> None:
    device = features.device
    check("weight", blocks, (None, None, None), FLOATS, device)
    heads, inputs, width = blocks.shape
    if sources < 1 or inputs % sources:
        raise GeometryError(
            f"weight reads {inputs} features per head, expected a multiple of the {sources} source layers"
        )
    check("features", features, (None, heads * inputs), (blocks.dtype,), device)
    check("prediction_mean", prediction_mean, (heads * width,), (torch.float32,), device)
    check("basis", basis, (heads * width, None), (torch.float32,), device)
    check("scores", scores, (len(features),), (torch.float32,), device)
    if LARGEST_RANK < basis.shape[1] < heads * width:
        raise GeometryError(f"rank r = {basis.shape[1]}, expected at most {LARGEST_RANK}, or d_t = {heads * width}")


class _TileSizes(NamedTuple):
    """A tile of z is tokens x columns, summed over `step` features at a time.

    shares: programs that share the columns of one block of tokens; per_share: tiles that each walks over.
    Chosen so that nothing, or little, leaves the registers on compute capabilities 8.0 and 9.0.
    """

    tokens: int
    columns: int
    step: int
    shares: int
    per_share: int
    warps: int
    stages: int


def _tile_sizes(count: int, blocks: torch.Tensor, rank: int) -> _TileSizes:
    """Large tiles where they fill the device, because they read W and x less often; else small ones."""
    heads, _, width = blocks.shape
    large = blocks.dtype != torch.float32 and triton.cdiv(count, 128) * triton.cdiv(heads * width, 64) >= PROGRAMS
    tokens, columns, line, warps, stages = (128, 64, 128, 8, 3) if large else (64, 32, 256, 4, 4)
    crowd = max(1, padded(rank) // RANKS)
    tokens, columns = max(SMALLEST_TILE, tokens // crowd), max(SMALLEST_TILE, min(columns, RANKS // crowd))
    while columns > SMALLEST_TILE and width % columns:
        columns //= 2
    tiles = heads * triton.cdiv(width, columns)
    per_share = triton.cdiv(tiles, min(tiles, triton.cdiv(PROGRAMS, triton.cdiv(count, tokens))))
    step = line // blocks.element_size()
    return _TileSizes(tokens, columns, step, triton.cdiv(tiles, per_share), per_share, warps, stages)


# The counts differ from prompt to prompt: a variant of the kernel for some of them would be compiled inside a request.
@triton.jit(do_not_specialize=["count", "per_share"])
def _map(
    features, weight, prediction_mean, basis, entries, energy, inside, count, per_share,
    feature_row, weight_head, weight_row, basis_row,
    HEADS: tl.constexpr, INPUTS: tl.constexpr, SOURCE_DIM: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    RANK_TILE: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A program computes z for one block of tokens and one share of the columns, and that share's energies."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    share = tl.program_id(1)
    live = token < count
    per_head: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    ranks = tl.arange(0, RANK_TILE)
    own_energy = tl.zeros([TOKENS], tl.float32)
    own_inside = tl.zeros([TOKENS, RANK_TILE], tl.float32)

    for tile in range(share * per_share, tl.minimum((share + 1) * per_share, HEADS * per_head)):
        head = tile // per_head
        column = tile % per_head * COLUMNS + tl.arange(0, COLUMNS)
        valid = column < WIDTH
        z = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for start in range(0, INPUTS, STEP):
            row = start + tl.arange(0, STEP)
            # A head's features: its dimensions in the first source layer, then in the second, ...
            feature = (row // SOURCE_DIM) * (HEADS * SOURCE_DIM) + head * SOURCE_DIM + row % SOURCE_DIM
            from_features = features + token[:, None] * feature_row + feature[None, :]
            x = tl.load(from_features, mask=live[:, None] & (row < INPUTS)[None, :], other=0.0)
            from_weight = weight + head * weight_head + row[:, None] * weight_row + column[None, :]
            w = tl.load(from_weight, mask=(row < INPUTS)[:, None] & valid[None, :], other=0.0)
            z = tl.dot(x, w, z, input_precision="tf32x3")

        target = head * WIDTH + column
        mean = tl.load(prediction_mean + target, mask=valid, other=0.0)
        to = entries + token[:, None] * (HEADS * WIDTH) + target[None, :]
        tl.store(to, z + mean[None, :], mask=live[:, None] & valid[None, :])
        own_energy += tl.sum(z * z, 1)
        if RANK:
            from_basis = basis + target[:, None] * basis_row + ranks[None, :]
            v = tl.load(from_basis, mask=valid[:, None] & (ranks < RANK)[None, :], other=0.0)
            own_inside = tl.dot(z, v, own_inside, input_precision=PRECISION)

    at = share * count + token
    tl.store(energy + at, own_energy, mask=live)
    if RANK:
        tl.store(inside + at[:, None] * RANK + ranks[None, :], own_inside, mask=live[:, None] & (ranks < RANK)[None, :])


# The counts differ from prompt to prompt: a variant of the kernel for some of them would be compiled inside a request.
@triton.jit(do_not_specialize=["count", "shares"])
def _add_energy(
    energy, inside, scores, count, shares, RANK: tl.constexpr, RANK_TILE: tl.constexpr, TOKENS: tl.constexpr
):
    """Adds max(0, ||z||^2 - ||z V_r||^2) of a block of tokens to `scores`: z V_r is a sum over the shares."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < count
    ranks = tl.arange(0, RANK_TILE)
    total = tl.zeros([TOKENS], tl.float32)
    projected = tl.zeros([TOKENS, RANK_TILE], tl.float32)
    for share in range(shares):
        at = share * count + token
        total += tl.load(energy + at, mask=live, other=0.0)
        mask = live[:, None] & (ranks < RANK)[None, :]
        projected += tl.load(inside + at[:, None] * RANK + ranks[None, :], mask=mask, other=0.0)
    outside = tl.maximum(total - tl.sum(projected * projected, 1), 0.0)
    tl.store(scores + token, tl.load(scores + token, mask=live) + outside, mask=live)
