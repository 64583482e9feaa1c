"""Pools, slots and rotations that the laws of the kernels share."""

from __future__ import annotations

import torch
import triton
from hypothesis import settings
from hypothesis import strategies as st

from sglang_ext.rope import Rotation, RopeSpec, Turn
from tests.kv.builders import random

# Interpreted where test_kernels.py asks for it, else on the GPU.
DEVICE = torch.device("cpu" if triton.knobs.runtime.interpret else "cuda")
few = settings(max_examples=5, deadline=None, derandomize=True, database=None)

dims = st.sampled_from([32, 64, 96, 128, 256])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
seeds = st.integers(0, 999)


def on_device(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return random(seed, *shape).to(DEVICE, dtype)


def paged_slots(lengths: list[int], page: int, seed: int) -> tuple[list[torch.Tensor], int]:
    """Slots of prompts of these lengths in pages at random places, and the pool's size: some pages stay free."""
    pages = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(pages) + 3, generator=torch.Generator().manual_seed(seed))
    slots = [
        (own[:, None] * page + torch.arange(page)).flatten()[:length].to(DEVICE)
        for own, length in zip(order[: sum(pages)].split(pages), lengths)
    ]
    return slots, len(order) * page


def rotation_to(positions: torch.Tensor, rotary_dim: int) -> Turn:
    """A rope that also scales, so that a rotation and its inverse differ in more than a sign."""
    spec = RopeSpec("yarn", 1e4, rotary_dim, factor=4.0, original_max_position=64, attention_factor=1.3)
    return Rotation(spec, DEVICE).at(positions)
