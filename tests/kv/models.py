"""Tiny models with random weights, and maps over them."""

from __future__ import annotations

import random as python_random
from functools import cache
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from sglang_ext.geometry import KVGeometry
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap
from tests.kv.builders import identity, random

VOCABULARY = 96
KINDS = ("qwen3", "llama", "llama-yarn")
_ROPE = {
    "qwen3": {"rope_type": "default", "rope_theta": 10000.0},
    "llama": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "llama-yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip


def random_model(
    kind: str, seed: int = 0, layers: int = 3, kv_heads: int = 2, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """Its weights are large, so that its choice of tokens is clear and depends on the whole context."""
    config_class, model_class = (Qwen3Config, Qwen3ForCausalLM) if kind == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=kv_heads, head_dim=16, max_position_embeddings=512, initializer_range=0.3,
        rope_parameters=_ROPE[kind], tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(seed)
    return model_class(config).float().eval()


def executor(kind: str, seed: int = 0, **shape: int) -> TransformersExecutor:
    return TransformersExecutor(random_model(kind, seed, **shape), identity(f"{kind}-{seed}"))


def prompts(lengths: tuple[int, ...], seed: int = 0, vocabulary: int = VOCABULARY) -> list[list[int]]:
    rng = python_random.Random(seed)
    return [[rng.randrange(vocabulary) for _ in range(length)] for length in lengths]


def noise_maps(source: KVGeometry, target: KVGeometry, rank: int = 4, seed: int = 0) -> CrossModelMap:
    """Maps that know nothing, from two source layers each."""
    layers = []
    for layer in range(target.layers):
        sides = {}
        for number, side in enumerate(SIDES):
            at = seed + 1000 * layer + 100 * number
            inputs = 2 * source.width
            basis = torch.linalg.qr(random(at + 1, target.width, target.width)).Q[:, :rank].contiguous()
            sides[side] = SideMap(
                (0, source.layers - 1), random(at, inputs, target.width) / inputs**0.5,
                random(at + 2, target.width), random(seed + 3, inputs), basis,
            )  # fmt: skip
        layers.append(sides)
    return CrossModelMap(tuple(layers))


@cache
def tokenizer():
    """The tiny family's, built once a run."""
    from sglang_ext.offline.family.tokenizer import build_tokenizer

    return build_tokenizer()


def model_folder(folder: Path, kind: str, seed: int, **shape: int) -> Path:
    """A random model and the tokenizer, as a served model lies on disk."""
    random_model(kind, seed, vocabulary=len(tokenizer()), **shape).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
