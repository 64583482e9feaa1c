"""Laws of rotation: it is the models' own, and moving a key is undoing one rotation and doing another."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import GeometryError
from sglang_ext.rope import SUPPORTED_ROPE, RopeSpec, Rotation
from tests.kv.builders import laws, random

HEAD = 64
MAXIMUM = 1024
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
CASES = {
    "default": {"rope_type": "default"},
    "default-theta": {"rope_type": "default", "rope_theta": 500000.0},
    "default-partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "linear-partial": {"rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 0.25},
    "llama3": LLAMA3,
    "llama3-partial": {**LLAMA3, "partial_rotary_factor": 0.5},
    "yarn": YARN,
    "yarn-beta": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": {**YARN, "attention_factor": 0.7},
    "yarn-mscale": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
    "yarn-partial": {**YARN, "partial_rotary_factor": 0.5},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-no-truncate": {**YARN, "truncate": False},
}
POSITIONS = torch.tensor([0, 1, 2, 255, 256, 1023, 1024, 8191, 9000, 40000])


def config_of(case: str) -> dict:
    """A configuration as transformers writes it."""
    return phi_config(case).to_dict()


def phi_config(case: str):
    from transformers import PhiConfig

    given = {"rope_theta": 10000.0, **CASES[case]}
    return PhiConfig(
        hidden_size=HEAD * 2, num_attention_heads=2, max_position_embeddings=MAXIMUM,
        rope_parameters={"partial_rotary_factor": 1.0, **given},
    )  # fmt: skip


def spec_of(case: str) -> RopeSpec:
    return RopeSpec.from_config(config_of(case), HEAD)


@pytest.mark.parametrize("case", CASES)
def test_rotation_equals_that_of_transformers(case):
    from transformers.models.phi.modeling_phi import PhiRotaryEmbedding, apply_rotary_pos_emb

    keys = random(0, len(POSITIONS), 2, HEAD)
    rope = PhiRotaryEmbedding(phi_config(case))
    cos, sin = rope(keys, POSITIONS[None])
    turned = cos.shape[-1]
    per_head = keys.transpose(0, 1)[None]
    _, expected = apply_rotary_pos_emb(per_head[..., :turned], per_head[..., :turned], cos, sin)
    expected = torch.cat([expected, per_head[..., turned:]], -1)[0].transpose(0, 1)

    # One unit in the last place of a frequency is 40000 * 2^-24 radians at the last position.
    torch.testing.assert_close(spec_of(case).frequencies(), rope.inv_freq, rtol=2e-7, atol=0)
    torch.testing.assert_close(Rotation(spec_of(case)).rotate(keys, POSITIONS), expected, rtol=0, atol=8e-3)
    within = POSITIONS < MAXIMUM
    torch.testing.assert_close(
        Rotation(spec_of(case)).rotate(keys[within], POSITIONS[within]), expected[within], rtol=0, atol=3e-4
    )


def test_the_cases_cover_every_supported_type():
    assert {CASES[case]["rope_type"] for case in CASES} == set(SUPPORTED_ROPE)


# SGLang is imported in its own process: it reads the environment once, and this process may need it otherwise.
# Left out: SGLang does not read `attention_factor` from a configuration, as transformers does.
SGLANG = [case for case in CASES if case != "yarn-attention-factor"]
SGLANG_SCRIPT = """
import json, sys, torch
from sglang.srt.layers.rotary_embedding import get_rope
torch.set_num_threads(1)
given = torch.load(sys.argv[1])
out = {}
for name, rope in json.loads(sys.argv[2]).items():
    maximum = rope.get("original_max_position_embeddings", 1024)
    theta, partial = rope.pop("rope_theta", 10000.0), rope.pop("partial_rotary_factor", 1.0)
    made = get_rope(64, 64, maximum, theta, True, rope, torch.float32, partial)
    flat = given["keys"].flatten(1)
    out[name] = made.forward_native(given["positions"], flat.clone(), flat.clone())[1].view_as(given["keys"])
torch.save(out, sys.argv[1])
"""


def test_rotation_equals_that_of_sglang(tmp_path):
    pytest.importorskip("sglang")
    positions = torch.tensor([0, 1, 2, 100, 200, 255])
    keys = random(1, len(positions), 2, HEAD)
    torch.save({"keys": keys, "positions": positions}, tmp_path / "exchange.pt")
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", "SGLANG_ROPE_CACHE_FP32": "1", "OMP_NUM_THREADS": "1"}
    cases = json.dumps({case: CASES[case] for case in SGLANG})
    done = subprocess.run(
        [sys.executable, "-c", SGLANG_SCRIPT, tmp_path / "exchange.pt", cases],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "exchange.pt")
    for case in SGLANG:
        ours = Rotation(spec_of(case)).rotate(keys, positions)
        torch.testing.assert_close(ours, theirs[case], rtol=0, atol=2e-4, msg=lambda text, case=case: f"{case}: {text}")


@laws
@given(case=st.sampled_from(sorted(CASES)), seed=st.integers(0, 99), start=st.integers(0, 40000))
def test_unrotate_undoes_rotate(case, seed, start):
    rotation = Rotation(spec_of(case))
    keys = random(seed, 5, 2, HEAD)
    positions = torch.arange(start, start + 5)
    torch.testing.assert_close(rotation.unrotate(rotation.rotate(keys, positions), positions), keys, rtol=0, atol=2e-6)
    torch.testing.assert_close(rotation.rotate(rotation.unrotate(keys, positions), positions), keys, rtol=0, atol=2e-6)


@pytest.mark.parametrize("distance", [1, 7, 8191, 9000])
@pytest.mark.parametrize("case", CASES)
def test_a_moved_key_equals_one_made_there(case, distance):
    """Case 50."""
    rotation = Rotation(spec_of(case))
    keys = random(2, 6, 2, HEAD)
    here = torch.arange(3, 9)
    there = here + distance
    for start, end in ((here, there), (there, here)):
        moved = rotation.rotate(rotation.unrotate(rotation.rotate(keys, start), start), end)
        torch.testing.assert_close(moved, rotation.rotate(keys, end), rtol=0, atol=3e-6)
    assert not torch.allclose(rotation.rotate(keys, here), rotation.rotate(keys, there), atol=1e-2)


@pytest.mark.parametrize("case", ["default", "linear", "llama3"])
def test_rotations_add(case):
    rotation = Rotation(spec_of(case))
    keys = random(3, 4, 1, HEAD)
    a, b = torch.tensor([0, 5, 17, 80]), torch.tensor([3, 900, 64, 1])
    torch.testing.assert_close(
        rotation.rotate(rotation.rotate(keys, a), b), rotation.rotate(keys, a + b), rtol=0, atol=5e-4
    )


def test_attention_factor_scales_the_rotated_part_and_only_it():
    plain = spec_of("yarn-partial")
    scaled = Rotation(plain)
    keys = random(4, 3, 2, HEAD)
    turned = scaled.rotate(keys, torch.tensor([0, 10, 500]))
    half = HEAD // 2
    torch.testing.assert_close(
        turned[..., :half].norm(dim=-1), keys[..., :half].norm(dim=-1) * plain.attention_factor, rtol=1e-5, atol=0
    )
    assert torch.equal(turned[..., half:], keys[..., half:])
    assert plain.attention_factor > 1.1


def test_keys_of_any_dtype_come_back_as_float32():
    rotation = Rotation(spec_of("default"))
    keys = random(5, 3, 2, HEAD).bfloat16()
    for turn in (rotation.rotate, rotation.unrotate):
        out = turn(keys, torch.arange(3))
        assert out.dtype == torch.float32
        assert torch.equal(out, turn(keys.float(), torch.arange(3)))


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "proportional", "invented"])
@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling"])
def test_an_unknown_type_is_refused_by_name(kind, form):
    config = {form: {"rope_type": kind, "factor": 2.0}, "rope_theta": 10000.0, "max_position_embeddings": MAXIMUM}
    with pytest.raises(GeometryError, match=f"'{kind}'.*default, linear, llama3, yarn"):
        RopeSpec.from_config(config, HEAD)


@pytest.mark.parametrize("case", [case for case in CASES if case != "yarn-no-truncate"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_old_and_new_configurations_give_one_spec(case, key):
    new = {"rope_theta": 10000.0, **CASES[case]}
    old = dict(new)
    config = {"rope_theta": old.pop("rope_theta"), "max_position_embeddings": MAXIMUM}
    if "partial_rotary_factor" in old:
        config["partial_rotary_factor"] = old.pop("partial_rotary_factor")
    old[key] = old.pop("rope_type")
    config["rope_scaling"] = None if case.startswith("default") else old
    assert RopeSpec.from_config(config, HEAD) == RopeSpec.from_config(
        {"rope_parameters": new, "max_position_embeddings": MAXIMUM}, HEAD
    )
    assert RopeSpec.from_config(config, HEAD) == spec_of(case)
