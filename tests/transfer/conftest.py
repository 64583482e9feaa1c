from __future__ import annotations

import pytest
import torch

from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap
from tests.kv.builders import geometry, one_thread, random  # noqa: F401

SOURCE = geometry(layers=3, query_heads=2, kv_heads=1, head_dim=4)  # d_s = 4 a layer
TARGET = geometry(layers=2, query_heads=4, kv_heads=2, head_dim=4)  # d_t = 8


@pytest.fixture
def source():
    return SOURCE


@pytest.fixture
def target():
    return TARGET


def source_mean(sources: tuple[int, ...]) -> torch.Tensor:
    """One mean per source layer, whatever the map: they come from one calibration."""
    return torch.cat([random(500 + source, SOURCE.width) for source in sources])


def random_map(
    sources: tuple[int, ...], rank: int, seed: int, dtype: torch.dtype = torch.float32, structure: str = "full"
) -> SideMap:
    outputs = TARGET.width
    # Structure `head` needs a source head for each target head: here both have TARGET.kv_heads of half the width.
    shape = (len(sources) * SOURCE.width, outputs)
    if structure == "head":
        shape = (TARGET.kv_heads, len(sources) * SOURCE.width // TARGET.kv_heads, TARGET.head_dim)
    basis = torch.linalg.qr(random(seed + 3, outputs, outputs).double()).Q[:, :rank].float()
    return SideMap(
        sources, random(seed, *shape).to(dtype), random(seed + 1, outputs),
        source_mean(sources), basis.contiguous(),
    )  # fmt: skip


def random_maps(
    sources: tuple[int, ...] = (0, 2), rank: int = 3, seed: int = 0, structure: str = "full"
) -> CrossModelMap:
    """Another map for each layer and side."""
    layers = range(TARGET.layers)
    return CrossModelMap(
        tuple(
            {side: random_map(sources, rank, 100 * layer + 10 * n + seed, structure=structure) for n, side in enumerate(SIDES)}
            for layer in layers
        )
    )
