"""Every kernel compiles for A100 (8.0) and H100 (9.0) within their limits, without one being there."""

from __future__ import annotations

import re

import pytest
import torch

from sglang_ext.kernels import attention, gather, scatter, score
from tests.kernels.compiler import compiled

CAPABILITIES = (80, 90)
capabilities = pytest.mark.parametrize("capability", CAPABILITIES)


def assert_on_tensor_cores(kernel, dtype: torch.dtype) -> None:
    assert kernel.asm["cubin"]
    operands = r"\.bf16\b" if dtype == torch.bfloat16 else r"\.tf32\b"
    assert re.search(r"(wgmma\.mma_async|mma\.sync)\S*" + operands, kernel.asm["ptx"])


@pytest.mark.parametrize(
    "capability, dim, dtype",
    [
        *((80, dim, torch.bfloat16) for dim in (64, 96, 128, 256)),
        *((90, dim, torch.bfloat16) for dim in (96, 128, 256)),
        (80, 256, torch.float32),  # what needs most of the smaller device
        (90, 64, torch.float32),
    ],
)
def test_attention(capability, dim, dtype):
    plan = attention.plan_tiles([torch.arange(100)], [torch.arange(100)], 5)
    query, pool = torch.zeros(100, 10, dim, dtype=dtype), torch.zeros(100, 2, dim, dtype=dtype)
    kernel = compiled(
        attention._frontier, capability, lambda: attention.frontier_attention(query, pool, pool, plan, 0.1)
    )
    assert_on_tensor_cores(kernel, dtype)


@pytest.mark.parametrize(
    "capability, dtype, count, shape, rank",
    [
        (80, torch.bfloat16, 2048, (8 * 1024, 1024), 128),  # large tiles
        (90, torch.bfloat16, 2048, (8 * 1024, 1024), 128),
        (80, torch.bfloat16, 150, (8, 4 * 128, 128), 64),  # small ones, by heads
        (90, torch.bfloat16, 150, (8, 4 * 128, 128), 64),
        (80, torch.bfloat16, 150, (8 * 768, 768), 512),  # a large rank
        (90, torch.bfloat16, 150, (4 * 256, 256), 256),  # the whole space
        (80, torch.float32, 150, (4 * 256, 256), 128),
    ],
)
def test_map(capability, dtype, count, shape, rank):
    weight = torch.zeros(shape, dtype=dtype)
    heads = 1 if weight.dim() == 2 else shape[0]
    d_t = heads * shape[-1]
    features, basis, scores = (
        torch.zeros(count, heads * shape[-2], dtype=dtype),
        torch.zeros(d_t, rank),
        torch.zeros(count),
    )

    def launch() -> None:
        score.map_and_score(features, weight, torch.zeros(d_t), basis, scores, 2)

    assert_on_tensor_cores(compiled(score._map, capability, launch), dtype)
    if rank < d_t:
        assert compiled(score._add_energy, capability, launch).asm["cubin"]


@capabilities
@pytest.mark.parametrize("dim, rotary_dim", [(96, 96), (128, 64)])
def test_gather_and_scatter(capability, dim, rotary_dim):
    pool, slots, table = torch.zeros(100, 2, dim, dtype=torch.bfloat16), torch.arange(40), torch.zeros(40, rotary_dim)
    entries = torch.zeros(40, 2, dim)

    def read() -> None:
        gather.gather_unrotated([pool], [pool], slots, table)

    def write() -> None:
        scatter.scatter_rotated(entries, entries, table, slots, pool, pool)

    assert compiled(gather._gather, capability, read).asm["cubin"]
    assert compiled(scatter._scatter, capability, write).asm["cubin"]
