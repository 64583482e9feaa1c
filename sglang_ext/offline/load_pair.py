"""A pair of models with random weights of given shapes, and a pack: for measuring time, not text."""

from __future__ import annotations

import os
import random
import re
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
    "qwen3-0.6b": PairShape(Shape(8, 512, 8, 2, 64, 1536), Shape(28, 1024, 16, 8, 128, 3072), k=3, rank=128),
    "qwen3-1.7b": PairShape(Shape(10, 768, 12, 2, 64, 2048), Shape(28, 2048, 16, 8, 128, 6144), k=8, rank=128),
}
_GIVEN = re.compile(r"((?:\d+x){5}\d+):((?:\d+x){5}\d+):k(\d+):r(\d+)")


def parse_shape(text: str) -> PairShape:
    """A named shape, or SOURCE:TARGET:kK:rR with models as LAYERSxHIDDENxHEADSxKV_HEADSxHEAD_DIMxMLP.

    Raises CalibrationError for anything else.
    """
    if text in SHAPES:
        return SHAPES[text]
    given = _GIVEN.fullmatch(text)
    if given is None:
        raise CalibrationError(
            f"shape {text!r}: expected one of {', '.join(SHAPES)}, or SOURCE:TARGET:kK:rR with each model as "
            "LAYERSxHIDDENxHEADSxKV_HEADSxHEAD_DIMxMLP, as in 8x384x6x2x64x1024:20x768x12x2x64x2048:k8:r32"
        )
    source, target = (Shape(*map(int, part.split("x"))) for part in given.groups()[:2])
    return PairShape(source, target, k=int(given[3]), rank=int(given[4]))


def make_pair(shape: str, seed: int, progress: Progress) -> Path:
    """Writes the pair unless it is there already; returns its folder: `source`, `target` and `pack`.

    The pack is bench-only: it maps noise to noise at the right cost. Raises CalibrationError for an
    unknown shape.
    """
    pair = parse_shape(shape)
    folder = cache_folder() / "load-pairs" / digest_fields([repr(pair), str(seed)])[:16]
    if (folder / "pack" / "pack.json").exists():
        return folder
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    for number, (role, one) in enumerate((("source", pair.source), ("target", pair.target))):
        _write_model(scratch / role, one, seed + number)
    source, target = (TransformersExecutor.from_folder(scratch / role) for role in ("source", "target"))
    features = pair.k * source.geometry.width
    settings = Settings(
        name="load-pair", k=pair.k, rank=pair.rank, tokens=3 * features, seed=seed,
        accept_prompts=2, bench_only=True,
    )  # fmt: skip
    names = ("load-source", "load-target")
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
