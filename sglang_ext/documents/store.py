"""The documents that one worker knows: records in memory, and records and KV in a storage."""

from __future__ import annotations

from pydantic import ValidationError

from sglang_ext.documents.lru import SizedLRU
from sglang_ext.documents.record import ID_PREFIX, DocumentRecord
from sglang_ext.documents.storage import Storage

RECORD_BYTES = 64 << 20
_RECORD = "record"


class DocumentStore:
    """Finds documents by id, and the KV that was stored of them by key.

    Every call may wait for the storage, and may come from any thread. Whatever cannot be read as what it claims to be
    is a miss, and counted in `broken`. The KV is the bytes of a block's file, which checks itself when it is loaded
    (KVBlock).
    """

    def __init__(self, storage: Storage, record_bytes: int = RECORD_BYTES) -> None:
        """record_bytes: bounds the records that are kept in memory."""
        self.broken = 0
        self._storage = storage
        self._records: SizedLRU[str, DocumentRecord] = SizedLRU(record_bytes, lambda record: record.nbytes)

    @property
    def storage_failed(self) -> int:
        """Calls that the storage did not carry out: a write that was not taken, a read that was not answered."""
        return self._storage.failed

    def put(self, record: DocumentRecord) -> DocumentRecord:
        """Takes a record in. One with the same content keeps its age and takes over the new one's end."""
        known = self.find(record.id, record.tenant)
        if known is not None:
            record = known.model_copy(update={"expires": record.expires})
        self._records.put(record.id, record)
        self._storage.write(_record_name(record.id), record.model_dump_json().encode())
        return record

    def find(self, document: str, tenant: str) -> DocumentRecord | None:
        """The document of that id, None where this tenant has none that is still alive."""
        record = self._records.get(document) or self._stored(document)
        if record is None or record.tenant != tenant:
            return None
        if record.expired:
            self.delete(record)
            return None
        self._records.put(document, record)
        return record

    def listed(self, tenant: str) -> list[DocumentRecord]:
        """All of a tenant's documents that are alive, the oldest first."""
        known = {record.id for record in self._records.values()}
        stored = {name.removesuffix(f".{_RECORD}") for name in self._storage.names() if name.endswith(f".{_RECORD}")}
        found = (self.find(document, tenant) for document in known | stored)
        return sorted(
            (record for record in found if record is not None), key=lambda record: (record.created, record.id)
        )

    def delete(self, record: DocumentRecord) -> None:
        """Forgets a document and the KV that any model made of it."""
        self._records.drop(record.id)
        self._storage.delete_all(f"{record.id}.")

    def put_block(self, record: DocumentRecord, key: str, data: bytes | memoryview) -> bool:
        """Stores the document's KV under `key` (record.py, `block_key`). False where it was not taken."""
        return self._storage.write(_block_name(record, key), data)

    def block(self, record: DocumentRecord, key: str) -> bytes | None:
        return self._storage.read(_block_name(record, key))

    def drop_block(self, record: DocumentRecord, key: str) -> None:
        """Forgets KV that turned out to be broken."""
        self.broken += 1
        self._storage.delete(_block_name(record, key))

    def _stored(self, document: str) -> DocumentRecord | None:
        if not document.startswith(ID_PREFIX) or not document.removeprefix(ID_PREFIX).isalnum():
            return None  # an id comes over HTTP: nothing but one of our own form becomes a file's name
        data = self._storage.read(_record_name(document))
        if data is None:
            return None
        try:
            record = DocumentRecord.model_validate_json(data)
        except ValidationError:
            record = None
        if record is None or record.id != document:
            self.broken += 1
            self._storage.delete(_record_name(document))
            return None
        return record


def _record_name(document: str) -> str:
    return f"{document}.{_RECORD}"


def _block_name(record: DocumentRecord, key: str) -> str:
    return f"{record.id}.{key}"
