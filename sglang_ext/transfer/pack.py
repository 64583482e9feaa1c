"""A pack: the maps from one model to another, with everything needed to trust or refuse them."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sglang_ext.errors import NotAccepted, PackError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap, Structure

FORMAT = 1
_PARTS = ("weight", "bias", "input_mean", "basis")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelRecord(_Strict):
    """One of the two models."""

    name: str
    model: str = Field(description="digest of configuration and weights")
    tokenizer: str
    template: str
    geometry: dict[str, Any]

    @classmethod
    def of(cls, name: str, identity: ModelIdentity, geometry: KVGeometry) -> ModelRecord:
        return cls(name=name, geometry=geometry.to_json(), **identity.to_json())

    @property
    def kv(self) -> KVGeometry:
        """The geometry as an object. Raises PackError where the record does not describe one."""
        try:
            return KVGeometry.from_json(self.geometry)
        except (KeyError, TypeError) as error:
            raise PackError(f"pack.json: the geometry of {self.name!r} is not one of a KV cache: {error}") from error


class LayerRecord(_Strict):
    """How one target layer and side was fitted."""

    sources: tuple[int, ...]
    r2: float = Field(description="explained variance on the calibration tokens")
    r2_held_out: float | None = None


class Arm(_Strict):
    """How the target continues held-out prompts when its cache comes from somewhere."""

    agreement: float = Field(description="share of the target's own greedy tokens that stay the most likely")
    kl: float = Field(description="mean KL to the target's own distribution, nats per token")


class Acceptance(_Strict):
    """Four measurements on held-out prompts, at one budget, and a cosine per layer (design.md)."""

    rho: float = Field(description="share of positions recomputed; the mean over the prompts where a coverage chose it")
    coverage: float | None = Field(
        None, description="share of the scores' sum that was recomputed, where it was asked for"
    )
    selector: str
    prompts: int
    target: Arm
    lifted: Arm
    wrong_prompt: Arm
    no_context: Arm
    attention_cosine: tuple[float, ...]

    @property
    def recovered(self) -> float:
        """The share of the way from no context to the target that the lift keeps, in agreement."""
        span = self.target.agreement - self.no_context.agreement
        return 0.0 if span <= 0 else (self.lifted.agreement - self.no_context.agreement) / span

    def failure(self, threshold: float) -> str | None:
        """Why this record does not pass, or None."""
        if self.no_context.agreement >= self.target.agreement:
            return "the held-out prompts need no context, so they prove nothing of the lift"
        if self.recovered < threshold:
            return f"the lift recovers {self.recovered:.2f} of the target's agreement, below {threshold:.2f}"
        if self.lifted.agreement <= self.wrong_prompt.agreement:
            return "a lift from the wrong prompt does as well as one from the right prompt"
        return None


class Manifest(_Strict):
    """`pack.json`."""

    format: Literal[1] = FORMAT
    name: str
    source: ModelRecord
    target: ModelRecord
    structure: Structure = "full"
    dtype: Literal["float32", "bfloat16"]
    k: int
    rank: int
    ridge: float
    corpus: str
    corpus_digest: str
    tokens: int
    stride: int
    seed: int
    bench_only: bool = False
    layers: tuple[dict[Literal["key", "value"], LayerRecord], ...]
    weights_sha256: str = Field("", description="identifies the pack, and with it every KV lifted through it")
    acceptance: Acceptance | None = None

    def check_accepted(self, threshold: float, allow_bench_only: bool) -> None:
        """Raises NotAccepted unless the lift may be used.

        A bench-only pack maps random weights: it carries no acceptance and is used only when told to.
        """
        if self.bench_only:
            if not allow_bench_only:
                raise NotAccepted(
                    f"pack {self.name!r} is bench-only: its models have random weights; "
                    "start the worker with --allow-bench-pack to measure with it"
                )
            return
        if self.acceptance is None:
            raise NotAccepted(
                f"pack {self.name!r} holds no acceptance record; run `kvlift calibrate` with held-out prompts"
            )
        failure = self.acceptance.failure(threshold)
        if failure is not None:
            raise NotAccepted(f"pack {self.name!r} is not accepted: {failure}")


class Pack:
    """A manifest and its maps."""

    def __init__(self, manifest: Manifest, maps: CrossModelMap) -> None:
        self.manifest = manifest
        self.maps = maps

    @property
    def digest(self) -> str:
        return self.manifest.weights_sha256

    def save(self, folder: str | Path) -> Pack:
        """Writes `pack.json` and `weights.safetensors`; returns the pack with its digest set."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        for layer, sides in enumerate(self.maps.layers):
            for side, one in sides.items():
                stem = f"layers.{layer}.{side}"
                # The sources belong to the weights: the file's digest must cover all that makes the KV.
                tensors[f"{stem}.sources"] = torch.tensor(one.sources)
                for part in _PARTS:
                    tensors[f"{stem}.{part}"] = getattr(one, part).contiguous()
        save_file(tensors, str(folder / "weights.safetensors"))
        manifest = self.manifest.model_copy(update={"weights_sha256": _sha256(folder / "weights.safetensors")})
        _write_manifest(folder, manifest)
        return Pack(manifest, self.maps)

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> Pack:
        """Raises PackError where a file is missing, malformed or not the one the manifest names.

        Also where the weights are not of the structure, shape or dtype that the manifest states, or come from
        more than one calibration.
        """
        folder = Path(folder)
        manifest = read_manifest(folder)
        weights = folder / "weights.safetensors"
        if _sha256(weights) != manifest.weights_sha256:
            raise PackError(f"{weights} is not the file that pack.json names: its SHA-256 differs")
        try:
            tensors = load_file(str(weights), device=device)
        except SafetensorError as error:
            raise PackError(f"{weights} cannot be read: {error}") from error
        if len(manifest.layers) != manifest.target.kv.layers:
            raise PackError(f"{folder}: {len(manifest.layers)} layers, the target has {manifest.target.kv.layers}")
        layers = tuple(
            {side: _side_map(tensors, layer, side, manifest) for side in SIDES} for layer in range(len(manifest.layers))
        )
        maps = CrossModelMap(layers)
        for side, means in maps.source_means.items():
            if not bool(torch.isfinite(means).all()):
                raise PackError(f"{folder}: the input means of side {side!r} hold NaN or infinite numbers")
        return cls(manifest, maps)

    def check_target(self, identity: ModelIdentity, geometry: KVGeometry) -> None:
        """Raises PackError unless this worker's model is the pack's target."""
        _check_model("target", self.manifest.target, identity, geometry)

    def check_source(self, identity: ModelIdentity, geometry: KVGeometry) -> None:
        """Raises PackError unless the block's model is the pack's source."""
        _check_model("source", self.manifest.source, identity, geometry)


def read_manifest(folder: str | Path) -> Manifest:
    """Reads `pack.json` alone. Raises PackError where it is missing or malformed."""
    path = Path(folder) / "pack.json"
    try:
        return Manifest.model_validate_json(path.read_text())
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}; expected a pack folder") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise PackError(f"{path}: {where}: {first['msg']}") from error


def rewrite_acceptance(folder: str | Path, record: Acceptance) -> Manifest:
    """Replaces the acceptance record in `pack.json`, at once or not at all; weights and digest stay.

    Returns the manifest as it is now. Raises PackError for a pack that cannot be read, and for a bench-only one.
    """
    manifest = read_manifest(folder)
    if manifest.bench_only:
        raise PackError(
            f"pack {manifest.name!r} is bench-only: what it maps is noise, so it carries no acceptance record"
        )
    manifest = manifest.model_copy(update={"acceptance": record})
    _write_manifest(Path(folder), manifest)
    return manifest


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    scratch = folder / f"pack.json.{os.getpid()}"
    scratch.write_text(manifest.model_dump_json(indent=2) + "\n")
    scratch.replace(folder / "pack.json")


def _side_map(tensors: dict[str, torch.Tensor], layer: int, side: str, manifest: Manifest) -> SideMap:
    stem = f"layers.{layer}.{side}"
    try:
        parts = {part: tensors[f"{stem}.{part}"] for part in _PARTS}
        sources, recorded = tuple(tensors[f"{stem}.sources"].tolist()), manifest.layers[layer][side].sources
    except KeyError as missing:
        raise PackError(f"the pack lacks {missing} of layer {layer}, side {side!r}") from missing
    if sources != recorded:
        raise PackError(f"{stem}: pack.json names source layers {recorded}, the weights were fitted to {sources}")
    depth = manifest.source.kv.layers
    if not sources or list(sources) != sorted(set(sources)) or not 0 <= sources[0] <= sources[-1] < depth:
        raise PackError(f"{stem}: source layers {sources} are not ascending layers of a source with {depth}")
    for part, expected in _expected(manifest, len(sources)).items():
        found = (tuple(parts[part].shape), parts[part].dtype)
        if found != expected:
            raise PackError(
                f"{stem}.{part} is {found[1]} {found[0]}; structure {manifest.structure!r}, dtype, rank and both "
                f"geometries in pack.json ask for {expected[1]} {expected[0]}"
            )
    return SideMap(sources=sources, **parts)


def _expected(manifest: Manifest, k: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor of one layer and side that reads k source layers."""
    source, target = manifest.source.kv, manifest.target.kv
    weight: tuple[int, ...] = (k * source.width, target.width)
    if manifest.structure == "head":
        weight = (target.kv_heads, k * source.head_dim, target.head_dim)
    exact = {"bias": (target.width,), "input_mean": (k * source.width,), "basis": (target.width, manifest.rank)}
    return {
        "weight": (weight, getattr(torch, manifest.dtype)),
        **{part: (shape, torch.float32) for part, shape in exact.items()},
    }


def _check_model(role: str, record: ModelRecord, identity: ModelIdentity, geometry: KVGeometry) -> None:
    for what in ("model", "tokenizer", "template"):
        made_for, found = getattr(record, what), getattr(identity, what)
        if made_for != found:
            raise PackError(
                f"the pack was made for {role} {record.name!r} with {what} {made_for[:12]}, "
                f"found {found[:12]}: calibrate a pack for this {role}"
            )
    # Through JSON on both sides: a manifest's numbers have been through it too.
    if record.geometry != json.loads(json.dumps(geometry.to_json())):
        raise PackError(f"the pack's {role} geometry {record.geometry} is not {geometry.to_json()}")


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise PackError(f"{path} cannot be read: {error.strerror}") from error
