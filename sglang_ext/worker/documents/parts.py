"""Document parts in the messages of a chat request, and the same request with their texts in their places."""

from __future__ import annotations

from typing import Any, Iterator, Sequence

from sglang_ext.worker.documents.bodies import DocumentPart

_DOCUMENT, _TEXT = "document", "text"


def has_documents(body: dict[str, Any]) -> bool:
    return any(_is(part, _DOCUMENT) for content in _contents(body) for part in content)


def document_parts(body: dict[str, Any]) -> list[DocumentPart]:
    """All of them, in the order in which they stand. Raises pydantic's ValidationError for a malformed one."""
    return [
        DocumentPart.model_validate(part) for content in _contents(body) for part in content if _is(part, _DOCUMENT)
    ]


def with_texts(body: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """The request as an SGLang without documents takes it: `texts` in the places of the document parts.

    Text and documents side by side become one text, to the letter: SGLang would put a space between two parts.
    """
    if not texts:
        return body
    rest = iter(texts)
    messages = []
    for message in body["messages"]:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(_is(part, _DOCUMENT) for part in content):
            message = {**message, "content": _joined(content, rest)}
        messages.append(message)
    return {**body, "messages": messages}


def _joined(content: list[Any], texts: Iterator[str]) -> str | list[Any]:
    joined: list[Any] = []
    for part in content:
        text = next(texts) if _is(part, _DOCUMENT) else part.get("text") if _is(part, _TEXT) else None
        if not isinstance(text, str):
            joined.append(part)
        elif joined and _is(joined[-1], _TEXT):
            joined[-1] = {"type": _TEXT, "text": joined[-1]["text"] + text}
        else:
            joined.append({"type": _TEXT, "text": text})
    return joined[0]["text"] if len(joined) == 1 and _is(joined[0], _TEXT) else joined


def _contents(body: dict[str, Any]) -> Iterator[list[Any]]:
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else []:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            yield content


def _is(part: Any, kind: str) -> bool:
    return isinstance(part, dict) and part.get("type") == kind
