"""Where a model's files lie: a local folder, or a hub repository in the local cache."""

from __future__ import annotations

from pathlib import Path


def local_folder(name_or_path: str, revision: str | None = None) -> Path:
    """A folder with the model's files. A hub name is downloaded unless it is in the hub's cache."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    return Path(snapshot_download(name_or_path, revision=revision, allow_patterns=wanted))
