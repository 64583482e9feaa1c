"""Blocks of random numbers."""

from __future__ import annotations

import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.rope import RopeSpec


def random_block(tokens: int = 5, attention: bool = False) -> KVBlock:
    geometry = KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, rope=RopeSpec("default", 1e4, 8))
    keys, values = torch.randn(2, 2, tokens, 2, 8)
    received = torch.rand(tokens) if attention else None
    return KVBlock(torch.arange(tokens), keys, values, geometry, ModelIdentity("m", "t", "c"), received)


def same(left: KVBlock, right: KVBlock) -> bool:
    """Equal to the last bit, and of the same model."""
    tensors = ((getattr(one, name) for name in ("tokens", "keys", "values")) for one in (left, right))
    received = left.attention, right.attention
    return (
        all(torch.equal(a, b) for a, b in zip(*tensors, strict=True))
        and (received == (None, None) or torch.equal(*received))
        and (left.geometry, left.identity) == (right.geometry, right.identity)
    )
