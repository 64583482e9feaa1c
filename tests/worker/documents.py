"""Documents for the tests: added to workers, compiled by the reference, and put into chat requests."""

from __future__ import annotations

from typing import Any, Sequence

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.document import Document
from sglang_ext.documents.tasks import LAYOUTS, DocumentItem, make_item, messages
from sglang_ext.offline.executor import TransformersExecutor
from tests.worker.servers import Worker

Part = dict[str, Any]


def add(worker: Worker, ids: Sequence[int], **more: Any) -> str:
    """Adds a document, by default plain; returns its id."""
    return worker.call("/v1/documents", **{"ids": list(ids), "method": "plain", **more})["id"]


def link(worker: Worker, spans: Sequence[Sequence[int] | str], documents: dict[str, list[int]], **more: Any) -> dict:
    """Links spans: token ids, or the names of documents."""
    return worker.call("/kv/link", input_ids=flat(spans, documents), documents=names(spans), **more)


def flat(spans: Sequence[Sequence[int] | str], documents: dict[str, list[int]]) -> list[int]:
    """The prompt's ids."""
    return [token for span in spans for token in (documents[span] if isinstance(span, str) else span)]


def names(spans: Sequence[Sequence[int] | str]) -> list[str]:
    return [span for span in spans if isinstance(span, str)]


def compiled(reference: TransformersExecutor, documents: dict[str, list[int]]) -> dict[str, Document]:
    return dict(zip(documents, Compiler(reference).compile(list(documents.values())), strict=True))


def item(index: int, layout: str = "3x2") -> DocumentItem:
    return make_item(LAYOUTS[layout], "test", index)


def texts(one: DocumentItem) -> list[str]:
    return [span.text for span in one.spans if span.document]


def chat(one: DocumentItem, parts: Sequence[Part], **more: Any) -> dict[str, Any]:
    """A chat request whose text is made of `parts`, and which asks the item's question."""
    system, user = messages(one)
    before, _, after = user["content"].partition("".join(span.text for span in one.spans[1:-1]))
    content = [plain(before), *parts, plain(after)]
    told = [system, {"role": "user", "content": content}]
    return {"messages": told, "temperature": 0, "max_tokens": 48, **more}


def by_text(text: str) -> Part:
    return {"type": "document", "text": text}


def by_id(document: str) -> Part:
    return {"type": "document", "id": document}


def plain(text: str) -> Part:
    return {"type": "text", "text": text}


def ask(worker: Worker, body: dict[str, Any]) -> dict[str, Any]:
    return worker.call("/v1/chat/completions", model=f"{worker.name}-served", **body)


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]
