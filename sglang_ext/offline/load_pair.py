"""A pair of models with random weights of given shapes, and a pack: for measuring time, not text."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from sglang_ext.errors import CalibrationError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity, cache_folder, digest_fields
from sglang_ext.transfer.fit import check_shapes
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap
from sglang_ext.transfer.pack import LayerRecord, Manifest, ModelRecord, Pack

CONTEXT = 16_384
CORPUS = "none: random maps of the right shapes, fitted to nothing"
FORM = "random maps"  # part of a kept pair's name, so that a pair of another making is not taken for this one


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


QWEN3_06B = Shape(28, 1024, 16, 8, 128, 3072)

# A target has the shapes of the model of that name. In each, the map is about 4 to 5 % of the target's body, as it is
# for the paper's Qwen3 pair.
SHAPES = {
    "default": PairShape(Shape(8, 384, 6, 2, 64, 1024), Shape(20, 768, 12, 2, 64, 2048), k=8, rank=32),
    "qwen3-0.6b": PairShape(Shape(8, 512, 8, 2, 64, 1536), Shape(28, 1024, 16, 8, 128, 3072), k=3, rank=128),
    "qwen3-1.7b": PairShape(Shape(10, 768, 12, 2, 64, 2048), Shape(28, 2048, 16, 8, 128, 6144), k=8, rank=128),
    "qwen3-4b": PairShape(QWEN3_06B, Shape(36, 2560, 32, 8, 128, 9728), k=2, rank=128),
    "qwen3-8b": PairShape(QWEN3_06B, Shape(36, 4096, 32, 8, 128, 12288), k=5, rank=128),
    "qwen3-14b": PairShape(QWEN3_06B, Shape(40, 5120, 40, 8, 128, 17408), k=8, rank=128),
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


def make_pair(shape: str, seed: int) -> Path:
    """Writes the pair unless it is there already; returns its folder: `source`, `target` and `pack`.

    The pack is bench-only: its maps have the right shapes, and so the right cost, and random numbers. Raises
    CalibrationError for an unknown shape.
    """
    pair = parse_shape(shape)
    folder = cache_folder() / "load-pairs" / digest_fields([FORM, repr(pair), str(seed)])[:16]
    if (folder / "pack" / "pack.json").exists():
        return folder
    scratch = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(scratch, ignore_errors=True)
    for number, (role, one) in enumerate((("source", pair.source), ("target", pair.target))):
        _write_model(scratch / role, one, seed + number)
    _random_pack(scratch, pair, seed).save(scratch / "pack")
    scratch.replace(folder)
    return folder


def _random_pack(folder: Path, pair: PairShape, seed: int) -> Pack:
    source, target = (KVGeometry.from_folder(folder / role) for role in ("source", "target"))
    check_shapes(source, target, pair.k, pair.rank, "full")
    generator = torch.Generator().manual_seed(seed)
    layers = tuple({side: _random_map(source, target, pair, generator) for side in SIDES} for _ in range(target.layers))
    records = tuple({side: LayerRecord(sources=one.sources, r2=0.0) for side, one in sides.items()} for sides in layers)
    ours, theirs = (ModelIdentity.from_folder(folder / role) for role in ("source", "target"))
    manifest = Manifest(
        name="load-pair", source=ModelRecord.of("load-source", ours, source),
        target=ModelRecord.of("load-target", theirs, target), dtype="float32", k=pair.k, rank=pair.rank, ridge=0.0,
        corpus=CORPUS, corpus_digest=digest_fields([CORPUS]), tokens=0, stride=1, seed=seed, bench_only=True,
        layers=records,
    )  # fmt: skip
    return Pack(manifest, CrossModelMap(layers))


def _random_map(source: KVGeometry, target: KVGeometry, pair: PairShape, generator: torch.Generator) -> SideMap:
    inputs = pair.k * source.width
    return SideMap(
        sources=tuple(torch.randperm(source.layers, generator=generator)[: pair.k].sort().values.tolist()),
        weight=torch.randn(inputs, target.width, generator=generator) / inputs**0.5,
        bias=torch.zeros(target.width),
        input_mean=torch.zeros(inputs),
        basis=torch.linalg.qr(torch.randn(target.width, pair.rank, generator=generator)).Q,
    )


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
