"""Packs for the tests whose right answer is known."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap
from sglang_ext.transfer.pack import LayerRecord, Manifest, ModelRecord, Pack


def identity_pack(model: Path, folder: Path, template: Path | None = None) -> Path:
    """Maps a model onto itself without loss: lifting at rho = 0 must give native KV.

    template: the server's --chat-template, if any.
    """
    width = KVGeometry.from_folder(model).width
    weight = torch.eye(width)
    return _write("identity", model, model, lambda layer: ((layer,), weight), folder, template)


def noise_pack(source: Path, target: Path, folder: Path) -> Path:
    """A map that is wrong everywhere: only a full recompute can give native logits."""
    ours, theirs = KVGeometry.from_folder(source), KVGeometry.from_folder(target)
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(ours.width, theirs.width, generator=generator)
    return _write("noise", source, target, lambda layer: ((layer % ours.layers,), weight), folder)


def _write(name: str, source: Path, target: Path, choose, folder: Path, template: Path | None = None) -> Path:
    geometry = KVGeometry.from_folder(target)
    layers, records = [], []
    for layer in range(geometry.layers):
        sources, weight = choose(layer)
        basis = torch.eye(geometry.width)[:, : geometry.width // 2]
        layers.append(
            {
                side: SideMap(sources, weight.clone(), torch.zeros(geometry.width), torch.zeros(len(weight)), basis.clone())
                for side in SIDES
            }
        )
        record = LayerRecord(sources=sources, r2=1.0, r2_held_out=1.0)
        records.append({"key": record, "value": record})
    manifest = Manifest(
        name=name, source=_record(source, template), target=_record(target, template), dtype="float32", k=1, rank=geometry.width // 2,
        ridge=0.0, corpus="none", corpus_digest="", tokens=1, stride=1, seed=0, bench_only=True, layers=tuple(records),
    )  # fmt: skip
    Pack(manifest, CrossModelMap(tuple(layers))).save(folder)
    return folder


def _record(model: Path, template: Path | None) -> ModelRecord:
    identity = ModelIdentity.from_folder(model, str(template) if template else None)
    return ModelRecord.of(model.name, identity, KVGeometry.from_folder(model))
