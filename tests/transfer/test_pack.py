"""Laws of a pack: it comes back as it was saved, and is refused with the reason wherever it does not fit."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_ext.errors import NotAccepted, PackError
from sglang_ext.transfer.maps import SIDES, CrossModelMap
from sglang_ext.transfer.pack import (
    Acceptance,
    Arm,
    LayerRecord,
    Manifest,
    ModelRecord,
    Pack,
    read_manifest,
    rewrite_acceptance,
)
from tests.kv.builders import identity, same_bits
from tests.transfer.conftest import SOURCE, TARGET, random_map, random_maps

PARTS = ("weight", "bias", "input_mean", "basis")


def arms(target=1.0, lifted=0.9, wrong=0.3, nothing=0.2) -> Acceptance:
    shares = {"target": target, "lifted": lifted, "wrong_prompt": wrong, "no_context": nothing}
    made = {name: Arm(agreement=share, kl=1 - share) for name, share in shares.items()}
    return Acceptance(rho=0.3, selector="rank_disagreement", prompts=4, attention_cosine=(0.99, 0.98), **made)


def manifest(**fields) -> Manifest:
    record = LayerRecord(sources=(0, 2), r2=0.9, r2_held_out=0.8)
    given = {
        "name": "pack", "source": ModelRecord.of("small", identity("s"), SOURCE),
        "target": ModelRecord.of("large", identity("t"), TARGET), "dtype": "float32", "k": 2, "rank": 3,
        "ridge": 0.01, "corpus": "words", "corpus_digest": "0" * 64, "tokens": 100, "stride": 1, "seed": 0,
        "layers": ({"key": record, "value": record},) * TARGET.layers, "acceptance": arms(),
    }  # fmt: skip
    return Manifest(**{**given, **fields})


@pytest.fixture
def folder(tmp_path):
    Pack(manifest(), random_maps()).save(tmp_path / "pack")
    return tmp_path / "pack"


def edit(folder, change) -> None:
    data = json.loads((folder / "pack.json").read_text())
    change(data)
    (folder / "pack.json").write_text(json.dumps(data))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_load_gives_what_was_saved(tmp_path, dtype):
    layers = tuple(
        {side: random_map((0, 2), 3, 10 * layer + n, getattr(torch, dtype)) for n, side in enumerate(SIDES)}
        for layer in range(TARGET.layers)
    )
    saved = Pack(manifest(dtype=dtype), CrossModelMap(layers)).save(tmp_path)
    loaded = Pack.load(tmp_path)
    assert loaded.manifest == saved.manifest
    assert loaded.digest == saved.digest != ""
    for ours, theirs in zip(loaded.maps.layers, layers, strict=True):
        for side in SIDES:
            assert ours[side].sources == theirs[side].sources
            assert all(same_bits(getattr(ours[side], part), getattr(theirs[side], part)) for part in PARTS)


def test_the_digest_is_that_of_the_weights(tmp_path):
    one, same = (Pack(manifest(), random_maps()).save(tmp_path / name).digest for name in "ab")
    other = Pack(manifest(), random_maps(seed=1)).save(tmp_path / "c").digest
    assert one == same != other


def test_every_pack_that_can_be_saved_can_be_loaded(tmp_path):
    fresh = LayerRecord(sources=(0, 2), r2=0.9, r2_held_out=float("nan"))  # as the fit leaves it
    Pack(manifest(layers=({"key": fresh, "value": fresh},) * TARGET.layers), random_maps()).save(tmp_path)
    assert len(Pack.load(tmp_path).maps.layers) == TARGET.layers


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_changed_weights_file_is_refused(folder, at):
    path = folder / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PackError, match="SHA-256 differs"):
        Pack.load(folder)


@pytest.mark.parametrize("name", ["pack.json", "weights.safetensors"])
def test_a_missing_file_is_named(folder, name):
    (folder / name).unlink()
    with pytest.raises(PackError, match=name):
        Pack.load(folder)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda d: d.update(thoughts="none"), "thoughts"),
        (lambda d: d["source"].update(colour="red"), "source.colour"),
        (lambda d: d["layers"][0]["key"].update(quality=1), "layers.0.key.quality"),
        (lambda d: d["acceptance"]["lifted"].update(mood=1), "acceptance.lifted.mood"),
        (lambda d: d.pop("ridge"), "ridge"),
        (lambda d: d.update(format=2), "format"),
        (lambda d: d.update(dtype="float64"), "dtype"),
        (lambda d: d.update(structure="diagonal"), "structure"),
    ],
)
def test_a_manifest_with_another_key_or_value_is_refused_by_name(folder, change, where):
    edit(folder, change)
    for load in (Pack.load, read_manifest):
        with pytest.raises(PackError, match=rf"pack\.json: {where}"):
            load(folder)


def test_a_manifest_that_is_not_json_is_refused(folder):
    (folder / "pack.json").write_text("{")
    with pytest.raises(PackError, match="pack.json"):
        Pack.load(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["layers"].pop(),
        lambda d: d["layers"].append(d["layers"][0]),
        lambda d: d["layers"][0].pop("value"),
    ],
    ids=["layer missing", "layer too many", "side missing"],
)
def test_a_manifest_whose_layers_are_not_the_targets_is_refused(folder, change):
    edit(folder, change)
    with pytest.raises(PackError):
        Pack.load(folder)


@pytest.mark.parametrize("sources", [[0, 1], [0, 7], [0, 1, 2], [2, 0]])
def test_other_source_layers_than_those_fitted_are_refused(folder, sources):
    edit(folder, lambda d: d["layers"][0]["key"].update(sources=sources))
    with pytest.raises(PackError):
        Pack.load(folder)


@pytest.mark.parametrize("role", ["source", "target"])
@pytest.mark.parametrize("field", ["model", "tokenizer", "template"])
def test_another_model_tokenizer_or_template_is_refused_by_role_and_field(folder, role, field):
    pack = Pack.load(folder)
    own, geometry = {"source": (identity("s"), SOURCE), "target": (identity("t"), TARGET)}[role]
    check = {"source": pack.check_source, "target": pack.check_target}[role]
    check(own, geometry)
    with pytest.raises(PackError, match=f"for {role} .* with {field} .*found other"):
        check(replace(own, **{field: "other" * 10}), geometry)


@pytest.mark.parametrize(
    "geometry",
    [replace(TARGET, layers=3), replace(TARGET, head_dim=8), replace(TARGET, rope=replace(TARGET.rope, theta=5e5))],
)
def test_another_geometry_is_refused(folder, geometry):
    with pytest.raises(PackError, match="target geometry"):
        Pack.load(folder).check_target(identity("t"), geometry)


def test_source_and_target_are_not_exchanged(folder):
    with pytest.raises(PackError, match="for source"):
        Pack.load(folder).check_source(identity("t"), TARGET)
    with pytest.raises(PackError, match="for target"):
        Pack.load(folder).check_target(identity("s"), SOURCE)


def test_a_pack_that_passes_is_accepted():
    manifest().check_accepted(0.8, allow_bench_only=False)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"acceptance": None}, "no acceptance record"),
        ({"acceptance": arms(lifted=0.6)}, r"recovers 0\.50 .* below 0\.80"),
        ({"acceptance": arms(lifted=0.9, wrong=0.9)}, "wrong prompt"),
        ({"acceptance": arms(lifted=0.9, wrong=0.95)}, "wrong prompt"),
        ({"bench_only": True}, "bench-only.*--allow-bench-pack"),
        ({"bench_only": True, "acceptance": None}, "bench-only"),
    ],
)
def test_a_pack_that_may_not_be_used_says_why(fields, reason):
    with pytest.raises(NotAccepted, match=reason) as caught:
        manifest(**fields).check_accepted(0.8, allow_bench_only=False)
    assert "'pack'" in str(caught.value)


def test_bench_only_is_allowed_only_on_request_and_allows_nothing_else():
    manifest(bench_only=True, acceptance=None).check_accepted(0.8, allow_bench_only=True)
    for bad in (None, arms(lifted=0.5)):
        with pytest.raises(NotAccepted):
            manifest(acceptance=bad).check_accepted(0.8, allow_bench_only=True)


@pytest.mark.parametrize(
    ("record", "recovered"),
    [
        (arms(1.0, 1.0, 0.3, 0.2), 1.0),
        (arms(1.0, 0.2, 0.3, 0.2), 0.0),
        (arms(1.0, 0.6, 0.3, 0.2), 0.5),
        (arms(1.0, 0.1, 0.05, 0.2), -0.125),
    ],
)
def test_recovered_is_the_share_of_the_way_from_no_context_to_the_target(record, recovered):
    assert record.recovered == pytest.approx(recovered)


def test_the_threshold_itself_passes():
    record = arms(1.0, 0.6, 0.3, 0.2)
    assert record.failure(record.recovered) is None
    assert record.failure(record.recovered + 1e-6) is not None


def test_prompts_that_need_no_context_prove_nothing():
    record = arms(target=1.0, lifted=0.4, wrong=0.3, nothing=1.0)
    assert record.failure(0.8) is not None


HEADED = replace(SOURCE, query_heads=4, kv_heads=2, head_dim=2)  # as wide as SOURCE, with as many KV heads as TARGET


def headed(structure: str = "head") -> Manifest:
    return manifest(structure=structure, source=ModelRecord.of("small", identity("s"), HEADED))


def rewritten(folder, change) -> None:
    """The weights file with some tensors changed, and its SHA-256 put right: made so, not damaged."""
    path = folder / "weights.safetensors"
    tensors = load_file(str(path))
    change(tensors)
    save_file({name: one.contiguous() for name, one in tensors.items()}, str(path))
    edit(folder, lambda d: d.update(weights_sha256=hashlib.sha256(path.read_bytes()).hexdigest()))


def test_weights_that_lack_a_tensor_are_refused(folder):
    rewritten(folder, lambda tensors: tensors.pop("layers.1.value.basis"))
    with pytest.raises(PackError, match="layers.1.value.basis"):
        Pack.load(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_pack_of_heads_loads_as_it_was_saved(tmp_path, dtype):
    layers = tuple(
        {side: random_map((0, 2), 3, 10 * layer + n, getattr(torch, dtype), "head") for n, side in enumerate(SIDES)}
        for layer in range(TARGET.layers)
    )
    Pack(headed().model_copy(update={"dtype": dtype}), CrossModelMap(layers)).save(tmp_path)
    loaded = Pack.load(tmp_path)
    assert loaded.manifest.structure == loaded.maps.structure == "head"
    for ours, theirs in zip(loaded.maps.layers, layers, strict=True):
        for side in SIDES:
            assert all(same_bits(getattr(ours[side], part), getattr(theirs[side], part)) for part in PARTS)
            assert ours[side].weight.dtype == getattr(torch, dtype)
            assert {getattr(ours[side], part).dtype for part in PARTS[1:]} == {torch.float32}


def test_a_pack_that_names_no_structure_is_full(folder):
    edit(folder, lambda d: d.pop("structure"))
    assert Pack.load(folder).manifest.structure == "full"


@pytest.mark.parametrize(("stated", "found"), [("full", "head"), ("head", "full")])
def test_a_structure_that_the_weights_have_not_is_refused(tmp_path, stated, found):
    Pack(headed(stated), random_maps(structure=found)).save(tmp_path)
    with pytest.raises(PackError, match=rf"layers\.0\.key\.weight is .*structure '{stated}'"):
        Pack.load(tmp_path)


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight", lambda t: t[:-1]),
        ("weight", lambda t: t.bfloat16()),
        ("bias", lambda t: t[:-1]),
        ("bias", lambda t: t.bfloat16()),
        ("input_mean", lambda t: t[:4]),
        ("input_mean", lambda t: t.double()),
        ("basis", lambda t: t[:, :2]),
        ("basis", lambda t: t.T),
    ],
)
def test_a_tensor_of_another_shape_or_dtype_than_the_manifest_states_is_refused(folder, part, change):
    name = f"layers.1.value.{part}"
    rewritten(folder, lambda tensors: tensors.update({name: change(tensors[name])}))
    with pytest.raises(PackError, match=rf"layers\.1\.value\.{part} is"):
        Pack.load(folder)


@pytest.mark.parametrize("sources", [(2, 0), (0, 0), (1, 3), (-1, 2)])
def test_source_layers_that_the_source_has_not_are_refused(folder, sources):
    rewritten(folder, lambda tensors: tensors.update({"layers.0.key.sources": torch.tensor(sources)}))
    edit(folder, lambda d: d["layers"][0]["key"].update(sources=list(sources)))
    with pytest.raises(PackError, match=r"layers\.0\.key: source layers .* source with 3"):
        Pack.load(folder)


def test_layers_of_two_calibrations_are_refused_at_load(folder):
    rewritten(folder, lambda tensors: tensors["layers.1.key.input_mean"].add_(1))
    with pytest.raises(PackError, match="must come from one calibration"):
        Pack.load(folder)


def test_means_that_are_not_finite_are_refused_at_load(folder):
    def spoil(tensors):
        for layer in range(TARGET.layers):
            tensors[f"layers.{layer}.value.input_mean"].fill_(float("inf"))

    rewritten(folder, spoil)
    with pytest.raises(PackError, match="means of side 'value' hold NaN or infinite"):
        Pack.load(folder)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_geometry_that_is_none_is_refused(folder, role):
    edit(folder, lambda d: d[role]["geometry"].pop("layers"))
    with pytest.raises(PackError, match="geometry of '(small|large)' is not one of a KV cache"):
        Pack.load(folder)


def test_a_new_acceptance_record_replaces_the_old_one_and_nothing_else(folder):
    before, weights = read_manifest(folder), (folder / "weights.safetensors").read_bytes()
    record = arms(lifted=0.95).model_copy(update={"selector": "random:3", "coverage": 0.9, "rho": 0.41})
    after = rewrite_acceptance(folder, record)
    loaded = Pack.load(folder)
    assert loaded.manifest == after == before.model_copy(update={"acceptance": record})
    assert loaded.digest == before.weights_sha256
    assert (folder / "weights.safetensors").read_bytes() == weights
    assert {path.name for path in folder.iterdir()} == {"pack.json", "weights.safetensors"}


def test_a_record_that_cannot_be_written_leaves_the_pack_as_it_was(folder, monkeypatch):
    before = (folder / "pack.json").read_bytes()

    def full_disk(self, text):
        with self.open("w") as file:
            file.write(text[: len(text) // 2])
        raise OSError("no space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full_disk)
    with pytest.raises(OSError, match="no space"):
        rewrite_acceptance(folder, arms(lifted=0.95))
    assert (folder / "pack.json").read_bytes() == before
    assert Pack.load(folder).manifest.acceptance == arms()


def test_a_bench_only_pack_takes_no_acceptance_record(tmp_path):
    Pack(manifest(bench_only=True, acceptance=None), random_maps()).save(tmp_path)
    with pytest.raises(PackError, match="'pack' is bench-only"):
        rewrite_acceptance(tmp_path, arms())


def test_a_record_without_a_coverage_loads_as_one_of_rho(folder):
    edit(folder, lambda d: d["acceptance"].pop("coverage", None))
    record = Pack.load(folder).manifest.acceptance
    assert (record.rho, record.coverage) == (0.3, None)
