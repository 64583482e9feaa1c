"""Where documents outlive a worker's memory: SGLang's own storage interface, as bytes under names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable, Protocol

import torch

from sglang_ext.errors import DocumentError

_LENGTH_BYTES = 8


class Storage(Protocol):
    """Bytes under names. Names are of our own making: letters, digits, `-` and `.`. Every call may wait for a disk or
    a network, and may come from any thread."""

    failed: int
    """Calls that were not carried out: what they asked for counts as absent."""

    def read(self, name: str) -> bytes | None:
        """The bytes, None where there are none or where they are cut short."""

    def write(self, name: str, data: bytes | memoryview) -> bool:
        """Replaces what is there. False where the storage does not take it."""

    def delete(self, name: str) -> None:
        """Harmless where there is nothing."""

    def delete_all(self, prefix: str) -> None:
        """Everything whose name begins so."""

    def names(self) -> Iterable[str]:
        """Of everything that is there."""


def sglang_backend(name: str, where: dict[str, Any]) -> Any:
    """One of SGLang's storage backends, for objects that belong to no rank. Raises what the backend raises."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=False, model_name=None, extra_config=where,
    )  # fmt: skip
    return StorageBackendFactory.create_backend(name, config, None)


class NoStorage:
    """Keeps nothing: documents live in memory alone."""

    failed = 0

    def read(self, name: str) -> bytes | None:
        return None

    def write(self, name: str, data: bytes | memoryview) -> bool:
        return False

    def delete(self, name: str) -> None:
        pass

    def delete_all(self, prefix: str) -> None:
        pass

    def names(self) -> Iterable[str]:
        return ()


class FileStorage:
    """A folder that several workers may share, through SGLang's file backend, which also bounds its size.

    Each object is its length and its bytes: the backend reads into buffers of a known size. It has no way to delete or
    list, and never overwrites, so that these three go to its files directly.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises DocumentError where the folder cannot be written."""
        self.failed = 0
        # The backend's memory of what exists would not learn of our deletions.
        where = {"file_storage_path": str(folder), "max_size": max_bytes, "enable_metadata_cache": False}
        try:
            self._backend = sglang_backend("file", where)
            self._folder = Path(self._backend.file_path)
            (self._folder / ".kvlift").touch()
        except OSError as error:
            raise DocumentError(f"the folder {folder} for documents cannot be written: {error.strerror}") from error
        self._suffix = f"{self._backend.config_suffix}.bin"

    def read(self, name: str) -> bytes | None:
        if not self._backend.exists(name):
            return None
        try:
            head = self._backend.get(name, torch.empty(_LENGTH_BYTES, dtype=torch.uint8))
            length = None if head is None else int.from_bytes(head.numpy().tobytes(), "big")
            if length is None or length > self._path(name).stat().st_size:
                return None
            whole = self._backend.get(name, torch.empty(_LENGTH_BYTES + length, dtype=torch.uint8))
        except OSError:  # shorter than it says, or gone in the meantime
            return None
        return None if whole is None else whole[_LENGTH_BYTES:].numpy().tobytes()

    def write(self, name: str, data: bytes | memoryview) -> bool:
        self.delete(name)
        framed = bytearray(len(data).to_bytes(_LENGTH_BYTES, "big"))
        framed += data
        taken = self._backend.set(name, torch.frombuffer(framed, dtype=torch.uint8))
        self.failed += not taken
        return taken

    def delete(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def delete_all(self, prefix: str) -> None:
        for path in self._folder.glob(f"{prefix}*{self._suffix}"):
            path.unlink(missing_ok=True)

    def names(self) -> Iterable[str]:
        return (path.name.removesuffix(self._suffix) for path in self._folder.glob(f"*{self._suffix}"))

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{self._suffix}"
