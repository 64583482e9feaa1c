"""Where a worker's documents outlive its memory, by its settings."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.documents.mooncake_storage import Master, MooncakeStorage
from sglang_ext.documents.storage import FileStorage, NoStorage, Storage
from sglang_ext.worker.settings import WorkerSettings

FOLDER_BYTES = 16 << 30
SEGMENT_BYTES = 1 << 30


def storage_of(settings: WorkerSettings) -> Storage:
    """A folder, a Mooncake store, or none. Raises DocumentError where it cannot be used."""
    where = settings.documents_store
    if where is None:
        return NoStorage()
    if not settings.documents_store_is_remote:
        return FileStorage(Path(where), settings.documents_store_bytes or FOLDER_BYTES)
    given = settings.documents_store_bytes or SEGMENT_BYTES
    return MooncakeStorage(
        Master.parse(where), settings.kv_host or "", settings.kv_protocol, settings.kv_device, given
    )  # fmt: skip
