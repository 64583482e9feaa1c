"""Adapters that change what is compiled, for the tests: random ones, since only their arithmetic is on trial."""

from __future__ import annotations

from pathlib import Path

import torch

from sglang_ext.documents.adapter import Base, Manifest, save_adapter
from sglang_ext.documents.settings import TrainSettings
from sglang_ext.documents.trainable import Trainable
from sglang_ext.offline.executor import TransformersExecutor

METHODS = ("packet", "joint", "sempic")
_STRENGTH = 0.1


def random_adapters(model: Path, folder: Path) -> dict[str, Path]:
    """One of each method, by method, made for a model."""
    return {method: random_adapter(model, method, folder / method) for method in METHODS}


def random_adapter(model: Path, method: str, folder: Path) -> Path:
    executor = TransformersExecutor.from_folder(model)
    made = Trainable(executor, TrainSettings(method=method, rank=4, soft=3))
    generator = torch.Generator().manual_seed(len(method))
    with torch.no_grad():
        for name, parameter in made.parameters.items():
            if "lora_B" in name:
                parameter.copy_(_STRENGTH * torch.randn(parameter.shape, generator=generator))
    base = Base(
        name=model.name, model=executor.identity.model, tokenizer=executor.identity.tokenizer, dtype="float32"
    )  # fmt: skip
    manifest = Manifest(
        base=base, settings=made.settings, data="none", data_digest="", records=0, updates=0, loss=(0.0,)
    )  # fmt: skip
    save_adapter(folder, made, manifest)
    return folder
