"""Who a model is: digests of its weights, its tokenizer and its chat template.

Two workers may exchange KV only where both render the same messages to the same ids, and a pack fits
only the two checkpoints it was made from. Names and paths prove neither.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Iterable, Mapping

from sglang_ext.errors import GeometryError

# Fields of config.json that leave the model's numbers as they are. Whatever is not listed counts.
_NOT_THE_MODEL = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id",
     "pad_token_id"}
)  # fmt: skip


@dataclass(frozen=True)
class ModelIdentity:
    """Hex SHA-256 digests of one served model."""

    model: str
    tokenizer: str
    template: str

    @classmethod
    def from_folder(cls, folder: str | Path, template_file: str | None = None) -> ModelIdentity:
        """Digests a local model folder. `template_file` is the server's --chat-template, if any.

        Weights are read in full once; their digest is then remembered in the cache folder under the
        file's path, size and modification time. Raises GeometryError where files are missing.
        """
        folder = Path(folder)
        return cls(_model_digest(folder), _tokenizer_digest(folder), _template_digest(folder, template_file))

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def cache_folder() -> Path:
    """Where kvlift keeps what it can make again: $KVLIFT_CACHE, or the user's cache folder."""
    root = os.environ.get("KVLIFT_CACHE") or Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "kvlift"
    return Path(root).expanduser()


def digest_fields(fields: Iterable[str]) -> str:
    """SHA-256 over length-prefixed fields: no two field lists can run together to the same bytes."""
    digest = hashlib.sha256()
    for field in fields:
        data = field.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _model_digest(folder: Path) -> str:
    config = _read_json(folder / "config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise GeometryError(f"{folder} holds no *.safetensors; kvlift identifies a model by its weights")
    fields = [json.dumps({k: v for k, v in config.items() if k not in _NOT_THE_MODEL}, sort_keys=True)]
    return digest_fields(fields + [_file_digest(path) for path in weights])


def _tokenizer_digest(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise GeometryError(f"{folder} holds no tokenizer.json; kvlift needs a fast tokenizer")
    data = _read_json(path)
    # Settings of a call, not of the vocabulary; saving a tokenizer may write them.
    data.pop("truncation", None)
    data.pop("padding", None)
    return digest_fields([json.dumps(data, sort_keys=True)])


def _template_digest(folder: Path, template_file: str | None) -> str:
    if template_file:
        path = Path(template_file)
        return digest_fields([path.read_text() if path.exists() else template_file])
    beside = folder / "chat_template.jinja"
    if beside.exists():
        return digest_fields([beside.read_text()])
    beside = folder / "tokenizer_config.json"
    template = _read_json(beside).get("chat_template") if beside.exists() else None
    return digest_fields([template if isinstance(template, str) else json.dumps(template)])


def _file_digest(path: Path) -> str:
    stat = path.stat()
    known = cache_folder() / "digests" / digest_fields(
        [str(path.resolve()), str(stat.st_size), str(stat.st_mtime_ns)]
    )
    if known.exists():
        return known.read_text()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    known.parent.mkdir(parents=True, exist_ok=True)
    scratch = known.with_suffix(f".{os.getpid()}")
    scratch.write_text(digest)
    scratch.replace(known)
    return digest


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        raise GeometryError(f"{path} does not exist; expected a local model folder")
    return json.loads(path.read_text())
