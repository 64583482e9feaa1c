"""Equation 11 against the paper's own numbers, and against operations counted by hand."""

from __future__ import annotations

import pytest

from sglang_ext.offline.bench.ceiling import Costs
from tests.kv.models import executor, noise_maps

# Qwen3-0.6B to 14B, k = 8, r = 128: the 14B's body of 40 layers of 5,120; 80 maps of 8,192 x 1,024; a score that, as
# the paper counts it, also multiplies the rank-r map's 8,192 x 128; 40 heads of 128.
PAPER = Costs(body=13_212_057_600, map=80 * 8192 * 1024, probe=80 * (8192 + 1024) * 128, alpha=4 * 40 * 40 * 128)


def test_the_papers_numbers():
    assert PAPER.map == pytest.approx(6.7e8, rel=0.01) and PAPER.map / PAPER.body == pytest.approx(0.05, abs=0.002)
    assert PAPER.ceiling_dense(2048, 0.3) == pytest.approx(2.74, abs=0.005)
    assert PAPER.ceiling_dense(32_768, 0.3) == pytest.approx(2.28, abs=0.006)
    assert PAPER.ceiling_frontier(32_768, 0.3) == pytest.approx(2.95, abs=0.006)


def test_a_small_case_by_hand():
    costs = Costs(body=100, map=10, probe=5, alpha=2)
    # T = 10: native 2 * 100 * 10 + 2 * 100 / 2 = 2,100; at rho = 0.5: 2 * (10 + 5 + 50) * 10 = 1,300 before attention.
    assert costs.native(10) == 2100
    assert costs.ceiling_dense(10, 0.5) == pytest.approx(2100 / (1300 + 100))
    assert costs.ceiling_frontier(10, 0.5) == pytest.approx(2100 / (1300 + 50))


@pytest.mark.parametrize("rho", [0.2, 0.3, 0.5])
def test_long_prompts_tend_to_the_share_of_attention(rho: float):
    lengths = (2**11, 2**14, 2**17, 2**26)
    dense = [PAPER.ceiling_dense(length, rho) for length in lengths]
    frontier = [PAPER.ceiling_frontier(length, rho) for length in lengths]
    assert dense == sorted(dense, reverse=True) and dense[-1] == pytest.approx(1 / (2 * rho), rel=1e-2)
    assert frontier == sorted(frontier) and frontier[-1] == pytest.approx(1 / rho, rel=1e-2)


def test_without_map_and_attention_the_ceiling_is_one_over_rho():
    costs = Costs(body=1000, map=0, probe=0, alpha=0)
    assert costs.ceiling_dense(77, 0.25) == costs.ceiling_frontier(77, 0.25) == pytest.approx(4)


def test_a_loaded_pair_is_counted_from_its_tensors():
    source, target = executor("qwen3", layers=2, kv_heads=1), executor("qwen3", seed=1)
    costs = Costs.of(target, noise_maps(source.geometry, target.geometry, rank=4))
    # 3 layers: queries and output 32 x 64, keys and values 32 x 32, three matrices of 32 x 48.
    assert costs.body == 3 * (2 * 32 * 64 + 2 * 32 * 32 + 3 * 32 * 48)
    assert costs.map == 3 * 2 * (2 * 16) * 32
    assert costs.probe == 3 * 2 * 32 * 4
    assert costs.alpha == 4 * 3 * 4 * 16
