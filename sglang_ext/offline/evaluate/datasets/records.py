"""Records of JSON lines, JSON arrays and CSV files, each with the place that an error names."""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sglang_ext.offline.evaluate.datasets.items import Dropped
from sglang_ext.offline.evaluate.errors import EvaluationError

MENDED = "undecodable bytes replaced"


class Record(NamedTuple):
    """The fields of one record, and `file:line` (or `file: record N` of a JSON array)."""

    where: str
    fields: dict[str, Any]

    def take(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A field of a type, a string among them not empty. Raises EvaluationError where it is not."""
        if name not in self.fields:
            raise EvaluationError(f"{self.where}: field `{name}` is missing; found {', '.join(self.fields) or 'none'}")
        value = self.fields[name]
        if not isinstance(value, kind) or value == "":
            raise EvaluationError(f"{self.where}: field `{name}` is {value!r}, which is not usable here")
        return value

    def name(self, *fields: str, default: int) -> str:
        """The first of these fields that is there and not empty, 0 included; else the default."""
        found = (self.fields.get(field) for field in fields)
        return str(next((one for one in found if one is not None and one != ""), default))

    def literal(self, name: str) -> Any:
        """A field that holds JSON or a Python literal as text, as CSV files hold lists; else the field itself."""
        value = self.take(name, (str, list, dict))
        if not isinstance(value, str):
            return value
        try:
            return ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
            raise EvaluationError(f"{self.where}: field `{name}` is not a list or mapping: {value[:80]!r}") from error


def read(path: Path, dropped: Dropped) -> Iterator[Record]:
    """The records of a `.jsonl`, `.json` or `.csv` file; counts in `dropped` the bytes that it had to replace.

    CSV files are separated by `,` or `;`, whichever the header holds more of. Raises EvaluationError for a file that is
    missing or of another kind, and for the first record that is broken.
    """
    readers = {".jsonl": _json_lines, ".json": _json, ".csv": _csv}
    if path.suffix not in readers:
        raise EvaluationError(f"{path}: expected a {', '.join(readers)} file")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise EvaluationError(f"{path} cannot be read: {error.strerror}") from error
    yield from readers[path.suffix](path, raw, dropped)


def _json_lines(path: Path, raw: bytes, _dropped: Dropped) -> Iterator[Record]:
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if line.strip():
            yield _checked(f"{path}:{number}", _parsed(f"{path}:{number}", line))


def _json(path: Path, raw: bytes, dropped: Dropped) -> Iterator[Record]:
    """An array; or, as some hub files are named, JSON lines."""
    if not raw.lstrip().startswith(b"["):
        yield from _json_lines(path, raw, dropped)
        return
    for number, record in enumerate(_parsed(str(path), raw), start=1):
        yield _checked(f"{path}: record {number}", record)


def _parsed(where: str, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise EvaluationError(f"{where}: not JSON: {error}") from error


def _checked(where: str, record: Any) -> Record:
    if not isinstance(record, dict):
        raise EvaluationError(f"{where}: expected an object, found {type(record).__name__}")
    return Record(where, record)


def _csv(path: Path, raw: bytes, dropped: Dropped) -> Iterator[Record]:
    text = raw.decode("utf-8-sig", errors="replace")
    if broken := text.count("\ufffd") - raw.count("\ufffd".encode()):
        dropped[MENDED] += broken
    header = text.split("\n", 1)[0]
    delimiter = max(",;", key=header.count)
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            where = f"{path}:{rows.line_num}"
            if None in row or None in row.values():
                raise EvaluationError(f"{where}: expected {len(rows.fieldnames or ())} fields, found another number")
            yield Record(where, row)
    except csv.Error as error:
        raise EvaluationError(f"{path}:{rows.line_num}: not CSV: {error}") from error
