"""What Writers are trained on: prompts as token ids, in spans of which some are documents."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_ext.documents.tasks import TRAINED, iter_items
from sglang_ext.errors import DocumentError

TINY = "tiny"
_TINY = re.compile(rf"{TINY}(-[^:/]+)?:")
TINY_ORDERS = 4  # orders of documents that training sees


@dataclass(frozen=True)
class Record:
    """One prompt: (ids, whether they are a document), in the order of the prompt; the last span is inline."""

    spans: tuple[tuple[tuple[int, ...], bool], ...]

    @property
    def prompt(self) -> list[int]:
        return [token for ids, _ in self.spans for token in ids]


@dataclass(frozen=True)
class Corpus:
    """Records that can be trained on, and how many could not.

    split: prompts in which tokens cross the border of a document, so that no server would find it there; open: prompts
    that do not end with inline text, or hold no document.
    """

    records: tuple[Record, ...]
    split: int = 0
    open: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 of the records."""
        return hashlib.sha256(repr(self.records).encode()).hexdigest()


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Span(_Strict):
    text: str
    document: bool = False


class _Line(_Strict):
    spans: tuple[_Span, ...]


def read_corpus(data: str, tokenizer: Any, limit: int | None = None) -> Corpus:
    """data: `tiny:N` for N records of the tiny task's train split, `tiny-LAYOUT:N` for one layout, or a JSON lines file.

    A line is `{"spans": [{"text": ..., "document": true}, ...]}`; the texts, joined, are the rendered prompt with the
    chat template's own tokens. limit: read the first so many. Raises DocumentError that names file and line.
    """
    texts = _tiny(data) if _TINY.match(data) else _lines(Path(data))
    return encode_records(texts, tokenizer, limit)


def encode_records(texts: Iterable[Iterable[tuple[str, bool]]], tokenizer: Any, limit: int | None = None) -> Corpus:
    """texts: per prompt its spans' texts, and whether each is a document."""
    records: list[Record] = []
    split = unfinished = 0
    for number, spans in enumerate(texts):
        if number == limit:
            break
        pieces = [(text, document) for text, document in spans if text]
        encoded = [(tuple(tokenizer.encode(text, add_special_tokens=False)), document) for text, document in pieces]
        record = Record(tuple(encoded))
        if not any(document for _, document in encoded) or encoded[-1][1]:
            unfinished += 1
        elif record.prompt != tokenizer.encode("".join(text for text, _ in pieces), add_special_tokens=False):
            split += 1
        else:
            records.append(record)
    if not records:
        raise DocumentError(
            f"no record can be trained on: {split} split a token at the border of a document, {unfinished} hold no "
            "document or do not end with inline text"
        )
    return Corpus(tuple(records), split, unfinished)


def _tiny(data: str) -> Iterator[list[tuple[str, bool]]]:
    kind, _, count = data.partition(":")
    if not count.isdigit() or not int(count):
        raise DocumentError(f"{data!r}: expected {kind}:N with a whole number of records, 1 or more")
    names = [layout.name for layout in TRAINED] if kind == TINY else [kind.removeprefix(f"{TINY}-")]
    rounds = -(-int(count) // len(names))
    for number, item in enumerate(iter_items(names, "train", rounds, orders=TINY_ORDERS)):
        if number < int(count):
            yield [(span.text, span.document) for span in item.spans]


def _lines(path: Path) -> Iterator[list[tuple[str, bool]]]:
    if not path.exists():
        raise DocumentError(f"{path} does not exist; expected a file of JSON lines or {TINY}:N")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                spans = _Line.model_validate_json(line).spans
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(str(part) for part in first["loc"])
                raise DocumentError(f"{path}:{number}: {where or 'line'}: {first['msg']}") from error
            yield [(span.text, span.document) for span in spans]
