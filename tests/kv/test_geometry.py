"""Laws of geometry: read from a configuration as the models read it, or refused with a reason."""

from __future__ import annotations

import json

import pytest

from sglang_ext.errors import GeometryError
from sglang_ext.geometry import KVGeometry
from sglang_ext.rope import RopeSpec

QWEN3 = {
    "model_type": "qwen3", "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2,
    "hidden_size": 256, "head_dim": 64, "rope_theta": 1e6, "max_position_embeddings": 4096,
}  # fmt: skip


def changed(**fields) -> dict:
    return {**QWEN3, **fields}


def test_a_geometry_is_what_the_configuration_says():
    found = KVGeometry.from_config(QWEN3)
    assert (found.layers, found.query_heads, found.kv_heads, found.head_dim) == (3, 8, 2, 64)
    assert found.width == 128
    assert (found.rope.kind, found.rope.theta, found.rope.rotary_dim) == ("default", 1e6, 64)


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_dim_defaults_to_hidden_size_over_heads(absent):
    config = {key: value for key, value in QWEN3.items() if key != "head_dim"} | absent
    found = KVGeometry.from_config(config)
    assert found.head_dim == found.rope.rotary_dim == 32


@pytest.mark.parametrize("absent", [{}, {"num_key_value_heads": None}])
def test_kv_heads_default_to_the_query_heads(absent):
    config = {key: value for key, value in QWEN3.items() if key != "num_key_value_heads"} | absent
    assert KVGeometry.from_config(config).kv_heads == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"kv_lora_rank": 512}, "MLA"),
        ({"mamba_d_state": 16}, "Mamba"),
        ({"ssm_state_size": 16}, "Mamba"),
        ({"linear_num_key_heads": 4}, "linear-attention"),
        ({"attention_chunk_size": 8192}, "chunked"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"use_sliding_window": True, "sliding_window": 1024}, "sliding"),
        # Mistral and others have no `use_sliding_window`: the window alone means sliding attention.
        ({"sliding_window": 4096}, "sliding"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
    ],
)
def test_another_layout_is_refused_with_the_reason(fields, reason):
    with pytest.raises(GeometryError, match=reason):
        KVGeometry.from_config(changed(**fields))


@pytest.mark.parametrize(
    "name",
    [
        "DeepseekV3Config", "JambaConfig", "BambaConfig", "MambaConfig", "Qwen3NextConfig", "Llama4TextConfig",
        "Gemma2Config", "Gemma3TextConfig", "MistralConfig",
    ],
)  # fmt: skip
def test_model_families_with_another_layout_are_refused(name):
    import transformers

    with pytest.raises(GeometryError):
        KVGeometry.from_config(getattr(transformers, name)().to_dict())


@pytest.mark.parametrize(
    "fields",
    [
        {"use_sliding_window": False, "sliding_window": 32768},
        {"use_sliding_window": True, "sliding_window": None},
        {"sliding_window": None},
        {"layer_types": ["full_attention"] * 3},
        {"layer_types": None, "kv_lora_rank": None, "mamba_d_state": 0},
    ],
)
def test_what_is_named_but_not_used_is_accepted(fields):
    assert KVGeometry.from_config(changed(**fields)) == KVGeometry.from_config(QWEN3)


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen2Config", "Qwen3Config"])
def test_supported_families_are_read(name):
    import transformers

    config = getattr(transformers, name)()
    found = KVGeometry.from_config(config.to_dict())
    assert (found.layers, found.kv_heads) == (config.num_hidden_layers, config.num_key_value_heads)


@pytest.mark.parametrize(
    "rope",
    [
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "mscale": 1.0,
            "mscale_all_dim": 0.3,
        },
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        None,
    ],
)
def test_a_geometry_survives_json(rope):
    made = KVGeometry.from_config(changed(rope_scaling=rope))
    assert KVGeometry.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_old_and_new_rope_fields_give_one_geometry():
    scaling = {"rope_type": "linear", "factor": 2.0}
    new = {key: value for key, value in QWEN3.items() if key != "rope_theta"}
    new["rope_parameters"] = {**scaling, "rope_theta": 1e6}
    old = changed(rope_scaling=scaling)
    assert KVGeometry.from_config(new) == KVGeometry.from_config(old)
    assert KVGeometry.from_config(new).rope == RopeSpec("linear", 1e6, 64, factor=2.0, original_max_position=4096)


def test_a_folder_is_read_through_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert KVGeometry.from_folder(tmp_path) == KVGeometry.from_config(QWEN3)
