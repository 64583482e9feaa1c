"""Laws of identity: a digest changes with what it stands for, and with nothing else."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sglang_ext.errors import GeometryError
from sglang_ext.identity import ModelIdentity, cache_folder, digest_fields
from tests.kv.builders import laws

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 8, "rope_theta": 1e4, "torch_dtype": "float32"}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model folder; what kvlift remembers of it lies beside."""
    monkeypatch.setenv("KVLIFT_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    write(model / "config.json", CONFIG)
    write(model / "tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "truncation": None, "padding": None})
    (model / "chat_template.jinja").write_text(TEMPLATE)
    save_file({"w": torch.arange(8.0)}, str(model / "model.safetensors"))
    return model


def write(path: Path, data: dict) -> None:
    path.write_text(json.dumps(data))


def changed_fields(before: ModelIdentity, after: ModelIdentity) -> set[str]:
    return {name for name in before.to_json() if before.to_json()[name] != after.to_json()[name]}


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def later(path: Path) -> None:
    """A file system's clock may be coarser than two writes."""
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000))


@laws
@given(
    st.lists(st.text(alphabet="ab\0é", max_size=4), max_size=4),
    st.lists(st.text(alphabet="ab\0é", max_size=4), max_size=4),
)
def test_field_lists_share_a_digest_only_when_they_are_equal(one, other):
    assert (digest_fields(one) == digest_fields(other)) == (one == other)


@laws
@given(st.text(alphabet="ab\0\x01", max_size=12), st.data())
def test_a_text_cut_elsewhere_has_another_digest(text, data):
    cuts = [data.draw(st.integers(0, len(text))) for _ in range(2)]
    pieces = [[text[:cut], text[cut:]] for cut in cuts]
    assert (digest_fields(pieces[0]) == digest_fields(pieces[1])) == (cuts[0] == cuts[1])
    assert digest_fields(pieces[0]) != digest_fields([text])


def test_one_folder_has_one_identity(folder):
    first = ModelIdentity.from_folder(folder)
    assert ModelIdentity.from_folder(str(folder)) == first
    assert all(len(digest) == 64 and int(digest, 16) for digest in first.to_json().values())
    assert len(set(first.to_json().values())) == 3


def test_a_copy_elsewhere_has_the_same_identity(folder):
    first = ModelIdentity.from_folder(folder)
    other = folder.rename(folder.with_name("moved"))
    assert ModelIdentity.from_folder(other) == first


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda f: (flip_last_byte(f / "model.safetensors"), later(f / "model.safetensors")), "model"),
        (lambda f: save_file({"v": torch.zeros(1)}, str(f / "more.safetensors")), "model"),
        (lambda f: write(f / "config.json", {**CONFIG, "rope_theta": 2e4}), "model"),
        (lambda f: write(f / "tokenizer.json", {"model": {"vocab": {"a": 1, "b": 0}}}), "tokenizer"),
        (lambda f: (f / "chat_template.jinja").write_text(TEMPLATE + " "), "template"),
    ],
    ids=["weight byte", "weight file", "rope", "vocabulary", "template"],
)
def test_a_change_changes_its_own_digest_and_no_other(folder, change, field):
    before = ModelIdentity.from_folder(folder)
    change(folder)
    assert changed_fields(before, ModelIdentity.from_folder(folder)) == {field}


@pytest.mark.parametrize(
    "change",
    [
        lambda f: write(f / "config.json", {**CONFIG, "torch_dtype": "bfloat16", "use_cache": False}),
        lambda f: write(f / "tokenizer.json", {"model": {"vocab": {"b": 1, "a": 0}}, "truncation": {"max_length": 8}}),
        lambda f: (f / "README.md").write_text("words"),
    ],
    ids=["call settings", "truncation", "other file"],
)
def test_what_changes_no_kv_and_no_ids_changes_no_digest(folder, change):
    before = ModelIdentity.from_folder(folder)
    change(folder)
    assert ModelIdentity.from_folder(folder) == before


@pytest.mark.parametrize(
    "field",
    [
        {"rms_norm_eps": 1e-3}, {"hidden_act": "gelu"}, {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_a_setting_that_changes_the_kv_of_the_same_weights_changes_the_model(folder, field):
    before = ModelIdentity.from_folder(folder)
    write(folder / "config.json", {**CONFIG, **field})
    assert changed_fields(before, ModelIdentity.from_folder(folder)) == {"model"}


def test_the_servers_own_template_replaces_the_folders(folder, tmp_path):
    own = ModelIdentity.from_folder(folder)
    (tmp_path / "given.jinja").write_text("another")
    given = ModelIdentity.from_folder(folder, str(tmp_path / "given.jinja"))
    assert changed_fields(own, given) == {"template"}
    (tmp_path / "same.jinja").write_text(TEMPLATE)
    assert ModelIdentity.from_folder(folder, str(tmp_path / "same.jinja")) == own


def test_a_template_has_one_digest_wherever_the_folder_keeps_it(folder):
    beside = ModelIdentity.from_folder(folder)
    (folder / "chat_template.jinja").unlink()
    write(folder / "tokenizer_config.json", {"chat_template": TEMPLATE})
    assert ModelIdentity.from_folder(folder) == beside


def remembered() -> list[Path]:
    return sorted((cache_folder() / "digests").glob("*"))


def test_a_digest_is_remembered_while_the_file_stays_the_same(folder):
    first = ModelIdentity.from_folder(folder)
    [known] = remembered()
    known.write_text("0" * 64)  # only a digest that was read from the cache can be this one
    assert changed_fields(first, ModelIdentity.from_folder(folder)) == {"model"}
    assert folder.parent in known.parents


def longer(path: Path) -> None:
    """Another size at the same time."""
    stat = path.stat()
    save_file({"w": torch.arange(9.0)}, str(path))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("change", [later, longer], ids=["time", "size"])
def test_a_remembered_digest_ends_with_the_files_time_or_size(folder, change):
    ModelIdentity.from_folder(folder)
    [known] = remembered()
    known.write_text("0" * 64)
    false = ModelIdentity.from_folder(folder)
    change(folder / "model.safetensors")
    assert changed_fields(false, ModelIdentity.from_folder(folder)) == {"model"}
    assert len(remembered()) == 2


def test_only_finished_digests_are_remembered(folder):
    ModelIdentity.from_folder(folder)
    assert [len(path.read_text()) for path in remembered()] == [64]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(GeometryError, match="safetensors" if name.startswith("model") else name):
        ModelIdentity.from_folder(folder)


def test_identities_differ_by_each_field():
    one = ModelIdentity("m", "t", "c")
    assert all(replace(one, **{name: "x"}) != one for name in one.to_json())
