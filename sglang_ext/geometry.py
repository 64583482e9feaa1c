"""The shape of a model's KV cache, read from its configuration."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

from sglang_ext.errors import GeometryError
from sglang_ext.rope import RopeSpec

# A key present with a true value means a cache layout that a position-free block cannot hold.
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention (MLA)",
    "mamba_d_state": "Mamba layers",
    "ssm_state_size": "Mamba layers",
    "linear_num_key_heads": "linear-attention layers",
    "attention_chunk_size": "chunked attention",
}


@dataclass(frozen=True)
class KVGeometry:
    """Layers, heads and rope of one model's KV cache (multi-head or grouped-query attention)."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec

    @property
    def width(self) -> int:
        """Values per token, layer and side: d = kv_heads * head_dim (section 3.1)."""
        return self.kv_heads * self.head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> KVGeometry:
        """Reads a Hugging Face configuration (its dictionary form).

        Raises GeometryError where the KV layout is not one that blocks can hold.
        """
        for key, what in _UNSUPPORTED.items():
            if config.get(key):
                raise GeometryError(
                    f"{config.get('model_type', 'model')}: {key}={config[key]!r} means {what}; "
                    "kvlift supports multi-head and grouped-query attention only"
                )
        for key in ("num_hidden_layers", "num_attention_heads"):
            if not config.get(key):
                raise GeometryError(
                    f"{config.get('model_type', 'model')}: the configuration has no {key}; "
                    "kvlift supports transformers with one attention cache per layer"
                )
        kinds = {kind for kind in config.get("layer_types") or () if kind != "full_attention"}
        # Some families state a window and a switch for it, others the window alone.
        windowed = config.get("sliding_window") and config.get("use_sliding_window", True)
        if kinds or windowed:
            raise GeometryError(
                f"{config.get('model_type', 'model')}: attention layers of kind "
                f"{sorted(kinds) or ['sliding_attention']}; kvlift supports full attention only"
            )
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return cls(
            layers=config["num_hidden_layers"],
            query_heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            rope=RopeSpec.from_config(config, head_dim),
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> KVGeometry:
        """Reads `config.json` of a model folder."""
        return cls.from_config(json.loads((Path(folder) / "config.json").read_text()))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> KVGeometry:
        return cls(**{**data, "rope": RopeSpec(**data["rope"])})
