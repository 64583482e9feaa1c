"""Frontier-causal attention: the one attention rule of the house, in torch.

A computed query at position p attends to every cache entry at positions <= p, filled or computed, and
to nothing later. Queries are sorted by position and cut into blocks; a block reads keys only up to its
own last position (its frontier), so the work is about half of the dense mask's rho * T^2 (appendix B.4).
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

LAST_QUERIES = 32  # whose attention the attention selectors read (section 2.2), in the last quarter of the layers

# Query rows of a block, all the query heads of one KV head counted: torch's kernel on a CPU works fastest from 768
# rows on (70 GFLOP/s a core, against 57 at 256 and 50 at 128), but a block of B out of S computed positions reads
# about B / S too much.
_SMALL_BLOCK, _LARGE_BLOCK = 256, 768
_LARGEST_WASTE = 1 / 4
# A prompt computed whole is ordinary causal attention. From here on torch's own is the faster way to it.
_CAUSAL_FROM = 1024


def frontier_attention(
    query: torch.Tensor,
    positions: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    block: int | None = None,
    on_device: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one prompt's computed positions over its whole cache.

    query: [S, query_heads, head_dim]; positions: int64 [S], sorted; keys, values: [T, kv_heads,
    head_dim] with row p at position p; block: positions per block, by default what is fastest for S; on_device:
    the positions again, where the query is, for callers that copy them once for all layers. Returns
    [S, query_heads, value_dim] in the query's dtype. Softmax runs in float32. Nothing is mutated.
    """
    rows, query_heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    group = query_heads // kv_heads
    keys = keys.to(query.dtype).transpose(0, 1)  # [kv_heads, T, head_dim]
    values = values.to(query.dtype).transpose(0, 1)
    if block is None and rows >= _CAUSAL_FROM and rows == int(positions[-1]) + 1:
        mixed = scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None, :, :rows], values[None, :, :rows],
            is_causal=True, scale=scale, enable_gqa=True,
        )  # fmt: skip
        return mixed[0].transpose(0, 1)
    block = block or _block(rows, group)
    # Each KV head's group of query heads is folded into the rows, so that keys are read once for all.
    folded = query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
    out = query.new_empty(rows, query_heads, values.shape[-1])
    ends = positions.tolist()
    on_device = positions.to(query.device) if on_device is None else on_device
    for start in range(0, rows, block):
        stop = min(start + block, rows)
        frontier = ends[stop - 1] + 1
        hidden = torch.arange(frontier, device=query.device) > on_device[start:stop, None]
        bias = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, float("-inf"))
        mixed = scaled_dot_product_attention(
            folded[:, :, start:stop].reshape(1, kv_heads, group * (stop - start), head_dim),
            keys[None, :, :frontier],
            values[None, :, :frontier],
            attn_mask=bias.repeat(group, 1),
            scale=scale,
        )
        mixed = mixed.view(kv_heads, group, stop - start, -1).permute(2, 0, 1, 3)
        out[start:stop] = mixed.reshape(stop - start, query_heads, -1)
    return out


def _block(rows: int, group: int) -> int:
    """Positions per block when `rows` are computed: the large block where it wastes little."""
    large = _LARGE_BLOCK // group
    return large if large <= _LARGEST_WASTE * rows else max(1, _SMALL_BLOCK // group)


def attention_weights(
    query: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """The softmax weights of these queries over all positions: float32 [S, query_heads, T].

    query: [S, query_heads, head_dim] at sorted int64 positions [S]; keys: [T, kv_heads, head_dim].
    """
    rows, query_heads, head_dim = query.shape
    length, kv_heads, _ = keys.shape
    grouped = query.float().view(rows, kv_heads, query_heads // kv_heads, head_dim)
    logits = torch.einsum("shgd,thd->shgt", grouped, keys.float()) * scale
    hidden = torch.arange(length, device=query.device) > positions.to(query.device)[:, None]
    return logits.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1).flatten(1, 2)


def attention_received(
    query: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, scale: float
) -> torch.Tensor:
    """The share of these queries' attention that each position receives: float32 [T], summing to 1.

    The mean over queries and heads of `attention_weights` (section 2.2, with the last 32 queries of a prompt).
    """
    return attention_weights(query, positions, keys, scale).mean((0, 1))
