"""A pair of models with random weights of given shapes, and a pack: for measuring time, not text."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import torch

from sglang_ext.errors import CalibrationError
from sglang_ext.identity import cache_folder, digest_fields
from sglang_ext.offline.calibrate import Progress, Settings, calibrate
from sglang_ext.offline.executor import TransformersExecutor

CONTEXT = 16_384
PROMPT_TOKENS = 128


@dataclass(frozen=True)
class Shape:
    """A Qwen3-architecture model without its embeddings."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int


@dataclass(frozen=True)
class PairShape:
    source: Shape
    target: Shape
    k: int
    rank: int


# In each, the map is about 4 to 5 % of the target's body, as it is for the paper's Qwen3 pair.
SHAPES = {
    "default": PairShape(Shape(8, 384, 6, 2, 64, 1024), Shape(20, 768, 12, 2, 64, 2048), k=8, rank=32),
}


def folder_of(shape: str, seed: int) -> Path:
    """Where a pair lies: `source`, `target` and `pack` inside. It may not exist yet."""
    return cache_folder() / "load-pairs" / digest_fields([shape, repr(SHAPES[shape]), str(seed)])[:16]


def make_pair(shape: str, seed: int, progress: Progress) -> Path:
    """Writes the pair unless it is there already; returns its folder.

    The pack is bench-only: it maps noise to noise at the right cost. Raises CalibrationError for an
    unknown shape.
    """
    if shape not in SHAPES:
        raise CalibrationError(f"unknown shape {shape!r}; expected one of {', '.join(SHAPES)}")
    folder = folder_of(shape, seed)
    if (folder / "pack" / "pack.json").exists():
        return folder
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    pair = SHAPES[shape]
    for number, (role, one) in enumerate((("source", pair.source), ("target", pair.target))):
        _write_model(scratch / role, one, seed + number)
    source, target = (TransformersExecutor.from_folder(scratch / role) for role in ("source", "target"))
    features = pair.k * source.geometry.width
    settings = Settings(
        name=f"load-pair-{shape}", k=pair.k, rank=pair.rank, tokens=3 * features, seed=seed,
        accept_prompts=2, bench_only=True,
    )  # fmt: skip
    names = (f"load-{shape}-source", f"load-{shape}-target")
    prompts = _noise(source.model.config.vocab_size, seed)
    calibrate(source, target, names, "uniform random tokens", prompts, settings, progress).save(scratch / "pack")
    scratch.replace(folder)
    return folder


def _noise(vocabulary: int, seed: int) -> Iterator[list[int]]:
    rng = random.Random(seed)
    while True:
        yield [rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)]


def _write_model(folder: Path, shape: Shape, seed: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sglang_ext.offline.family.tokenizer import TURN_END, build_tokenizer

    tokenizer = build_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        num_hidden_layers=shape.layers, hidden_size=shape.hidden, intermediate_size=shape.mlp,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
