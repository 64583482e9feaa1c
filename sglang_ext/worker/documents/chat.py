"""Documents in chat requests: read, and linked.

The request goes on with the documents' texts in their places, under the namespace of its linked prefix, so that
streaming, tools, grammars and limits are SGLang's own.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Callable, Sequence

from sglang_ext.documents.record import DocumentRecord
from sglang_ext.errors import DocumentError
from sglang_ext.worker.answers import APPLIED, Answer, fallback
from sglang_ext.worker.documents.bodies import DocumentPart, LinkBody, LinkOptions
from sglang_ext.worker.documents.parts import document_parts, with_texts
from sglang_ext.worker.documents.service import Documents

_NAMESPACES = "kvlift:"


class ChatDocuments:
    """Makes of a chat request with documents one without."""

    def __init__(self, documents: Documents, render: Callable[[dict[str, Any]], list[int]], policy: str) -> None:
        """render: token ids of a chat request, blocking; policy: of settings.py, `documents`."""
        self._documents = documents
        self._render = render
        self._policy = policy

    def read(self, body: dict[str, Any]) -> tuple[dict[str, Any], list[DocumentRecord], LinkOptions]:
        """The request with the texts in place, the documents in their order, and the options.

        Raises UnknownDocument, DocumentError, or pydantic's ValidationError. Takes nothing into the store.
        """
        body = dict(body)
        options, salt = LinkOptions.of(body), body.get("cache_salt")
        records = [self._record(part, options, salt) for part in document_parts(body)]
        return with_texts(body, [record.text for record in records]), records, options

    async def link(self, body: dict[str, Any]) -> tuple[dict[str, Any], Answer]:
        """The request to send on, and what to tell of the documents. Raises as `read` does."""
        started = time.perf_counter()
        if self._policy == "off":
            raise DocumentError("documents are off on this worker; start it with --documents auto or explicit")
        plain, records, options = await asyncio.to_thread(self.read, body)
        if str(plain.get("extra_key") or "").startswith(_NAMESPACES):
            return plain, fallback("the prompt was lifted: its KV is here already")
        if plain.get("lora_path"):
            raise DocumentError("documents are compiled without lora_path; leave it out, or send the text")
        ids = await asyncio.to_thread(self._render, plain)
        linkable = await asyncio.to_thread(self._linkable, records)
        answer, origins = fallback("no document is compiled, and this worker compiles none on first sight"), []
        if linkable:
            wanted = [records[index] for index in linkable]
            body = LinkBody(
                input_ids=ids, documents=[record.id for record in wanted], recompute=options.recompute, rho=options.rho,
                extra_key=plain.get("extra_key"), cache_salt=plain.get("cache_salt"),
            )  # fmt: skip
            answer, origins = await self._documents.link(body, wanted)
        told = _told(answer, records, dict(zip(linkable, origins, strict=True)), len(ids))
        told["ms"]["total"] = (time.perf_counter() - started) * 1e3
        self._count(told)
        return _under(plain, answer), told

    def _linkable(self, records: Sequence[DocumentRecord]) -> list[int]:
        return [index for index, record in enumerate(records) if self._may_link(record)]

    def _may_link(self, record: DocumentRecord) -> bool:
        """Whether the document is known; where the policy allows it, it is from now on."""
        known = self._documents.known(record)
        if not known and self._policy == "auto":
            self._documents.put(record)
            return True
        return known

    def _record(self, part: DocumentPart, options: LinkOptions, salt: str | None) -> DocumentRecord:
        if part.id is not None:
            return self._documents.find(part.id, salt)
        assert part.text is not None
        return self._documents.named(part.text, options.method, salt)

    def _count(self, told: Answer) -> None:
        counters = self._documents.counters
        for one in told["documents"]:
            counters.documents_missed += one["start"] is None
            counters.document_hits += one["start"] is not None and one["from"] != "compiled"
            counters.documents_compiled += one["from"] == "compiled"


def _under(body: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """The request under the namespace of its linked prefix, into which its salt is folded."""
    if answer["status"] != APPLIED:
        return body
    body = {**body, "extra_key": answer["namespace"], "cache_salt": None}
    return body if answer["input_ids"] is None else {**body, "input_ids": answer["input_ids"]}


def _told(answer: Answer, records: Sequence[DocumentRecord], origins: dict[int, str], prompt: int) -> Answer:
    """What the answer's field says. origins: of the documents that were to be linked, by index; prompt: its tokens."""
    starts = dict(zip(origins, answer.get("starts") or [None] * len(origins), strict=True))
    nothing = {"prompt": prompt, "cached": 0, "linked": 0, "computed": prompt, "missed": 0}
    tokens = answer.get("tokens") or nothing
    left = sum(len(record.ids) for index, record in enumerate(records) if index not in origins)
    documents = [
        {"id": record.id, "tokens": len(record.ids), "start": starts.get(index), "from": origins.get(index, "inline")}
        for index, record in enumerate(records)
    ]
    return {
        "status": answer["status"],
        "reason": answer["reason"],
        "tokens": {**tokens, "missed": tokens["missed"] + left},
        "documents": documents,
        "ms": dict(answer.get("ms") or {}),
    }
