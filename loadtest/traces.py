"""Recorded traces: CSV of time, context tokens, output tokens, with or without a heading.

The time is a number of seconds, or a date and time (`2023-11-16 18:15:46.6805900`) of which every decimal counts.
The public traces of Azure's LLM services are such files.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from loadtest.errors import BadTrace
from loadtest.schedule import Arrival

_COLUMNS = "time,context tokens,output tokens"
_DATE = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def read_trace(path: Path) -> list[Arrival]:
    """The arrivals of a file at the speed at which they were recorded; the first is at 0 s.

    Raises `BadTrace` for a file that cannot be read, is empty, has a broken line, or goes back in time.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = [(number, fields) for number, fields in enumerate(csv.reader(file), start=1) if fields]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadTrace(f"{path}: {error}; expected a CSV file of {_COLUMNS}") from error
    if lines and _is_heading(lines[0][1]):
        del lines[0]
    if not lines:
        raise BadTrace(f"{path}: no arrival; expected lines of {_COLUMNS}")
    seconds = _seconds if _number(lines[0][1][0]) is not None else _timestamp
    parsed = [_parse(path, number, fields, seconds) for number, fields in lines]
    for (number, _), (earlier, *_), (later, *_) in zip(lines[1:], parsed, parsed[1:], strict=False):
        if _since(earlier, later) < 0:
            raise BadTrace(f"{path}, line {number}: earlier than the line before; expected times in order")
    first = parsed[0][0]
    return [
        Arrival(index, _since(first, time), context, output) for index, (time, context, output) in enumerate(parsed)
    ]


# Whole seconds and the rest apart: together they would lose the decimals of a date.
_Time = tuple[int, float]


def _since(earlier: _Time, later: _Time) -> float:
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def _parse(path: Path, number: int, fields: list[str], time_of: Callable[[str], _Time]) -> tuple[_Time, int, int]:
    where = f"{path}, line {number}"
    if len(fields) != 3:
        raise BadTrace(f"{where}: {len(fields)} fields in {','.join(fields)[:80]!r}; expected {_COLUMNS}")
    try:
        time = time_of(fields[0].strip())
    except ValueError as error:
        raise BadTrace(f"{where}: time {fields[0]!r}; expected {error}") from None
    context, output = (_tokens(where, name, text) for name, text in zip(("context", "output"), fields[1:], strict=True))
    return time, context, output


def _tokens(where: str, name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise BadTrace(f"{where}: {name} tokens {text!r}; expected a whole number above 0")
    return int(text)


def _seconds(text: str) -> _Time:
    value = _number(text)
    if value is None:
        raise ValueError("seconds, like the first line's")
    return math.floor(value), value - math.floor(value)


def _timestamp(text: str) -> _Time:
    expected = "seconds, or a date and time like 2023-11-16 18:15:46.6805900"
    match = _DATE.fullmatch(text)
    if match is None:
        raise ValueError(expected)
    whole, fraction, zone = match.groups()
    try:
        date = datetime.fromisoformat(whole + (zone or "Z"))
    except ValueError:
        raise ValueError(expected) from None
    return round((date - _EPOCH).total_seconds()), float(fraction or 0)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _is_heading(fields: list[str]) -> bool:
    """A first line without any digit names its columns."""
    return not any(character.isdigit() for field in fields for character in field)
