"""Small geometries, blocks and settings that the law tests of the KV core share."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.rope import RopeSpec

laws = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """The tensors here are tiny: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def identity(name: str = "m") -> ModelIdentity:
    return ModelIdentity(model=f"{name}-model", tokenizer="tokenizer", template="template")


def geometry(layers: int = 2, query_heads: int = 4, kv_heads: int = 2, head_dim: int = 4) -> KVGeometry:
    return KVGeometry(layers, query_heads, kv_heads, head_dim, RopeSpec("default", 10000.0, head_dim))


def random_block(shape: KVGeometry, length: int, seed: int = 0, name: str = "m", dtype=torch.float32) -> KVBlock:
    size = (shape.layers, length, shape.kv_heads, shape.head_dim)
    keys, values = random(seed, *size), random(seed + 1, *size).to(dtype)
    return KVBlock(torch.arange(length) * 7 + seed, keys, values, shape, identity(name))


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal shape, dtype and bytes: unlike `equal`, also where both hold the same NaN."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return one.contiguous().flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8))
