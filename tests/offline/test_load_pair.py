"""The load pair: given shapes, from a seed, bench-only."""

from __future__ import annotations

import json

import pytest

from sglang_ext.errors import CalibrationError, NotAccepted
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.offline.load_pair import SHAPES, make_pair, parse_shape
from sglang_ext.transfer.pack import Pack

TINY = "2x32x2x1x16x48:3x48x4x2x16x64:k2:r8"


def test_a_pair_has_the_given_shapes_and_a_bench_only_pack(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIFT_CACHE", str(tmp_path))
    folder = make_pair(TINY, 0)
    source, target = (KVGeometry.from_folder(folder / role) for role in ("source", "target"))
    assert (source.layers, source.kv_heads, source.head_dim) == (2, 1, 16)
    assert (target.layers, target.query_heads, target.kv_heads) == (3, 4, 2)
    assert json.loads((folder / "target" / "config.json").read_text())["intermediate_size"] == 64
    pack = Pack.load(folder / "pack")
    for role, check in (("source", pack.check_source), ("target", pack.check_target)):
        check(ModelIdentity.from_folder(folder / role), KVGeometry.from_folder(folder / role))
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "something half made is left"
    manifest = pack.manifest
    assert "random maps" in manifest.corpus and manifest.tokens == 0
    assert manifest.bench_only and manifest.acceptance is None and manifest.k == 2 and manifest.rank == 8
    with pytest.raises(NotAccepted, match="allow-bench-pack"):
        manifest.check_accepted(0.0, allow_bench_only=False)
    manifest.check_accepted(1.0, allow_bench_only=True)


def test_a_pair_is_made_once_and_the_seed_makes_the_weights(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLIFT_CACHE", str(tmp_path / "one"))
    first = make_pair(TINY, 0)
    when = (first / "pack" / "pack.json").stat().st_mtime_ns
    assert make_pair(TINY, 0) == first and (first / "pack" / "pack.json").stat().st_mtime_ns == when
    assert make_pair(TINY, 1) != first
    monkeypatch.setenv("KVLIFT_CACHE", str(tmp_path / "two"))
    again = make_pair(TINY, 0)
    for role in ("source", "target"):
        assert (again / role / "model.safetensors").read_bytes() == (first / role / "model.safetensors").read_bytes()


def test_the_default_is_named_by_its_own_text():
    assert parse_shape("8x384x6x2x64x1024:20x768x12x2x64x2048:k8:r32") == SHAPES["default"]


@pytest.mark.parametrize("text", ["", "huge", "8x384:20x768:k8:r32", "8x384x6x2x64x1024:20x768x12x2x64x2048"])
def test_an_unknown_shape_is_refused_with_the_form(text):
    with pytest.raises(CalibrationError, match="LAYERSxHIDDEN"):
        parse_shape(text)
