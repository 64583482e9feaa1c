"""A trained adapter on disk: the Writer's LoRA in peft's format, soft tokens, and a manifest of whose they are."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from peft import LoraConfig, PeftConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sglang_ext.documents.compilers import Compiler, Envelope
from sglang_ext.documents.settings import TrainSettings
from sglang_ext.documents.trainable import Trainable
from sglang_ext.documents.writer import Writer
from sglang_ext.errors import DocumentError
from sglang_ext.identity import ModelIdentity, digest_fields
from sglang_ext.offline.executor import TransformersExecutor

FORMAT = 1
MANIFEST = "writer.json"
_CONFIG, _LORA, _SOFT = "adapter_config.json", "adapter_model.safetensors", "soft_tokens.safetensors"
_PREFIX = "base_model.model."  # before each name in peft's files


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Base(_Strict):
    """The model that was trained with, and the only one that may be used with."""

    name: str
    model: str = Field(description="digest of configuration and weights")
    tokenizer: str
    dtype: str = Field(description="in which it ran")


class Manifest(_Strict):
    """`writer.json`."""

    format: Literal[1] = FORMAT
    base: Base
    settings: TrainSettings
    data: str
    data_digest: str
    records: int
    updates: int
    loss: tuple[float, ...] = Field(description="mean of each epoch, nats per token")
    files: dict[str, str] = Field({}, description="SHA-256 of each file with weights")

    @property
    def digest(self) -> str:
        """Identifies the adapter, and with it every KV compiled with it: its weights and how they are applied."""
        applied = [self.settings.method, str(self.settings.rank), str(self.settings.alpha), str(self.settings.soft)]
        return digest_fields([*applied, *(f"{name} {sha}" for name, sha in sorted(self.files.items()))])

    def check_base(self, identity: ModelIdentity) -> None:
        """Raises DocumentError unless this is the model that the adapter was trained on."""
        for what in ("model", "tokenizer"):
            made_for, found = getattr(self.base, what), getattr(identity, what)
            if made_for != found:
                raise DocumentError(
                    f"the adapter was trained on {self.base.name!r} with {what} {made_for[:12]}, found {found[:12]}: "
                    "use it with that model, or train one for this"
                )


def save_adapter(folder: Path, trainable: Trainable, manifest: Manifest) -> Manifest:
    """Writes the adapter; returns the manifest with the digests of its files. The manifest is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in (MANIFEST, _CONFIG, _LORA, _SOFT):
        (folder / stale).unlink(missing_ok=True)
    written = []
    if trainable.writer is not None:
        _save_tensors(folder / _LORA, {f"{_PREFIX}{name}": one for name, one in trainable.writer.state().items()})
        (folder / _CONFIG).write_text(_config_text(trainable.writer.config, manifest.base.name))
        written.append(_LORA)
    if trainable.header is not None:
        _save_tensors(folder / _SOFT, {"header": trainable.header, "trailer": trainable.trailer})
        written.append(_SOFT)
    manifest = manifest.model_copy(update={"files": {name: _sha256(folder / name) for name in written}})
    scratch = folder / f"{MANIFEST}.{os.getpid()}"
    scratch.write_text(manifest.model_dump_json(indent=2) + "\n")
    scratch.replace(folder / MANIFEST)
    return manifest


def read_manifest(folder: str | Path) -> Manifest:
    """Reads `writer.json` alone. Raises DocumentError where it is missing or malformed."""
    path = Path(folder) / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_text())
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}; expected an adapter's folder") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DocumentError(f"{path}: {where}: {first['msg']}") from error


class Weights(NamedTuple):
    """An adapter's tensors: LoRA by peft's names (`model.layers.0.self_attn.q_proj.lora_A.weight`), and soft tokens."""

    manifest: Manifest
    lora: dict[str, torch.Tensor] | None
    soft: dict[str, torch.Tensor] | None


def read_weights(folder: str | Path, identity: ModelIdentity) -> Weights:
    """Raises DocumentError for an adapter of another base, and for files that are missing, malformed or not those that
    the manifest names.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    manifest.check_base(identity)
    tensors = {name: _checked_tensors(folder / name, sha) for name, sha in manifest.files.items()}
    expected = [
        name
        for name, has in ((_LORA, manifest.settings.has_adapter), (_SOFT, manifest.settings.has_soft_tokens))
        if has
    ]
    if sorted(tensors) != sorted(expected):
        raise DocumentError(
            f"{folder}: method {manifest.settings.method!r} needs {expected}, the manifest names {sorted(tensors)}"
        )
    lora = tensors.get(_LORA)
    bare = None if lora is None else {name.removeprefix(_PREFIX): one for name, one in lora.items()}
    return Weights(manifest, bare, tensors.get(_SOFT))


def load_compiler(executor: TransformersExecutor, folder: str | Path) -> Compiler:
    """Puts an adapter into the executor's model, switched off, and gives the compiler that uses it.

    A model may carry several. Raises DocumentError as `read_weights` does.
    """
    folder = Path(folder)
    manifest, lora, soft = read_weights(folder, executor.identity)
    writer = _load_writer(executor, folder, manifest, lora) if lora is not None else None
    return Compiler(
        executor,
        writer.writing if writer is not None else None,
        _envelope(executor, folder, soft) if soft is not None else None,
    )


def _load_writer(
    executor: TransformersExecutor, folder: Path, manifest: Manifest, state: dict[str, torch.Tensor]
) -> Writer:
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as error:
        raise DocumentError(f"{folder / _CONFIG} cannot be read: {error}") from error
    settings = manifest.settings
    if not isinstance(config, LoraConfig) or (config.r, config.lora_alpha) != (settings.rank, settings.alpha):
        raise DocumentError(f"{folder / _CONFIG} is not LoRA of rank {settings.rank} and alpha {settings.alpha}")
    writer = Writer(executor.model, config, name=f"writer_{manifest.digest[:12]}")
    writer.restore(state)
    return writer


def _envelope(executor: TransformersExecutor, folder: Path, tensors: dict[str, torch.Tensor]) -> Envelope:
    width = executor.model.config.hidden_size
    for name in ("header", "trailer"):
        if name not in tensors or tensors[name].dim() != 2 or tensors[name].shape[1] != width:
            raise DocumentError(f"{folder / _SOFT}: expected {name} [tokens, {width}], found {list(tensors)}")
    return Envelope(tensors["header"], tensors["trailer"])


def _save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file({name: one.detach().cpu().contiguous() for name, one in tensors.items()}, str(path))


def _checked_tensors(path: Path, sha: str) -> dict[str, torch.Tensor]:
    if _sha256(path) != sha:
        raise DocumentError(f"{path} is not the file that {MANIFEST} names: its SHA-256 differs")
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise DocumentError(f"{path} cannot be read: {error}") from error


def _config_text(config: LoraConfig, base: str) -> str:
    """peft's own file, with sets in one order, so that the same training gives the same bytes."""
    fields: dict[str, Any] = {**config.to_dict(), "base_model_name_or_path": base, "inference_mode": True}
    plain = {name: sorted(value) if isinstance(value, set) else value for name, value in fields.items()}
    return json.dumps(plain, indent=2, sort_keys=True) + "\n"


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DocumentError(f"{path} cannot be read: {error.strerror}") from error
