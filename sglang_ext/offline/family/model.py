"""Shapes of the four models, their random start, and the folder a finished one is saved in."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sglang_ext.offline.family.tokenizer import END_OF_TEXT, MAX_POSITIONS, TURN_END

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ModelName = Literal["large", "medium", "small", "documents"]

HEAD_DIM = 32
KV_HEADS = 3


@dataclass(frozen=True)
class Recipe:
    """Shape and training settings of one model. Times are shares of all steps."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    steps: int
    stage_ends: tuple[float, ...]
    """when each stage of the curriculum ends"""
    local_layers: int
    """the first layers, which see only a few tokens back until the run settles"""
    settle_from: float
    """from here on every layer sees everything and the learning rates fall to zero"""
    biographies: float = 0.5
    """share of the chats that are about a biography"""
    start: ModelName | None = None
    """the committed model that training goes on from, on stories in sections (pairs.py); random weights by default"""
    matrix_lr: float = 0.02
    other_lr: float = 3e-3


RECIPES: dict[ModelName, Recipe] = {
    "large": Recipe(
        hidden=128, layers=6, mlp=320, heads=6,
        steps=1600, stage_ends=(0.40625, 0.875, 1.0), local_layers=2, settle_from=0.75,
    ),
    "medium": Recipe(
        hidden=112, layers=4, mlp=256, heads=6,
        steps=1200, stage_ends=(0.55, 0.9, 1.0), local_layers=1, settle_from=0.65, biographies=0.75,
    ),
    "small": Recipe(
        hidden=96, layers=3, mlp=192, heads=6,
        steps=780, stage_ends=(0.589, 0.9, 1.0), local_layers=1, settle_from=0.717, biographies=0.75,
    ),
    "documents": Recipe(
        hidden=112, layers=4, mlp=256, heads=6,
        steps=500, stage_ends=(1.0,), local_layers=0, settle_from=0.5, start="medium", matrix_lr=0.01, other_lr=2e-3,
    ),
}  # fmt: skip


def committed(name: ModelName) -> Path:
    """The folder of a model that comes with the package."""
    return Path(__file__).parent / "models" / f"kvlift-tiny-{name}"


def model_config(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> "Qwen3Config":
    """A Qwen3 configuration; every layer sees the whole prompt."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.mlp,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )


def save_model(model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write weights (rounded to bf16), configuration and tokenizer so that transformers and SGLang load them."""
    import torch
    from transformers import GenerationConfig, Qwen3ForCausalLM

    rounded = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id
    )
    rounded.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
