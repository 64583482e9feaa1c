"""Labelled outcomes from CSV: what the score was, and whether each model was right.

A file has one line per request and a header. RouteLLM's public outcomes have this shape too: a column `prompt`, one
column per model, named as the model and holding True or False, further columns `MODEL_response`, and no score; the
scores then come from a second file.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

ALIASES = {
    "score": ("score", "confidence", "win_rate"),
    "small_right": ("small_right", "small_correct", "small", "weak_right", "weak_correct", "weak"),
    "large_right": ("large_right", "large_correct", "large", "strong_right", "strong_correct", "strong"),
    "prompt": ("prompt", "question"),
}
"""The column names that are understood without being asked for, in any case, most preferred first."""

_TRUE = frozenset({"true", "yes", "right", "correct"})
_FALSE = frozenset({"false", "no", "wrong", "incorrect"})


class OutcomesError(ValueError):
    """A file or a set of outcomes that no threshold can be fitted to; names the file, the line and the value."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request: its score, and how right each model was, from 0 to 1."""

    score: float
    small_right: float
    large_right: float


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of the columns to read; None: the first alias that the header has."""

    score: str | None = None
    small: str | None = None
    large: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One record; `line` is where it begins in the file, from 1."""

    line: int
    values: dict[str, str]


@dataclass(frozen=True, slots=True)
class Sheet:
    """A CSV file with a header."""

    name: str
    header: tuple[str, ...]
    rows: tuple[Row, ...]

    @classmethod
    def parse(cls, name: str, lines: Iterable[str]) -> Sheet:
        """Reads the lines of a file opened with newline="". Raises `OutcomesError`."""
        reader = csv.reader(lines, strict=True)
        records = _records(name, reader)
        start, first = next(records, (1, []))
        header = tuple(field.strip() for field in first)
        if not any(header):
            raise OutcomesError(f"{name}: empty; expected a header such as score,small_right,large_right")
        if double := next((field for field in header if header.count(field) > 1), None):
            raise OutcomesError(f"{name}:{start}: the header names {double!r} twice; rename one")
        rows = []
        for line, fields in records:
            if len(fields) != len(header):
                raise OutcomesError(
                    f"{name}:{line}: {len(fields)} fields, expected {len(header)} as in the header: {fields!r:.80}"
                )
            rows.append(Row(line, dict(zip(header, fields, strict=True))))
        if not rows:
            raise OutcomesError(f"{name}: a header and no outcomes; give one line per request")
        return cls(name, header, tuple(rows))

    def find(self, role: str, asked: str | None = None) -> str | None:
        """The column for a role of `ALIASES`: the one asked for, else the first alias, else None.

        Raises `OutcomesError` where the one asked for is not there.
        """
        if asked is not None:
            if asked not in self.header:
                raise OutcomesError(f"{self.name}: no column {asked!r}; columns: {', '.join(self.header)}")
            return asked
        by_lower = {field.lower(): field for field in reversed(self.header)}
        return next((by_lower[alias] for alias in ALIASES[role] if alias in by_lower), None)

    def need(self, role: str, asked: str | None, option: str) -> str:
        """The column for a role. Raises `OutcomesError` where there is none."""
        column = self.find(role, asked)
        if column is None:
            known = " or ".join(ALIASES[role])
            raise OutcomesError(
                f"{self.name}: no column for {role} ({known}); name it with {option}; columns: {', '.join(self.header)}"
            )
        return column


def read_outcomes(sheet: Sheet, columns: Columns, scores: Sheet | None = None) -> list[Outcome]:
    """One outcome per line of `sheet`, in its order. Raises `OutcomesError`.

    `scores`: where the scores are, None: in the sheet itself. Two files are joined by their prompts where both have
    them, else line by line.
    """
    small = sheet.need("small_right", columns.small, "--small-column")
    large = sheet.need("large_right", columns.large, "--large-column")
    if small == large:
        raise OutcomesError(f"{sheet.name}: {small!r} is named for the small and the large model; name two columns")
    values = _scores(sheet, columns, scores)
    return [
        Outcome(score, _right(sheet, row, small), _right(sheet, row, large))
        for score, row in zip(values, sheet.rows, strict=True)
    ]


def _scores(sheet: Sheet, columns: Columns, scores: Sheet | None) -> list[float]:
    source = sheet if scores is None else scores
    column = source.need("score", columns.score, "--score-column (or give the scores' file with --scores)")
    if scores is None:
        return [_number(sheet, row, column) for row in sheet.rows]
    prompts = sheet.find("prompt"), scores.find("prompt")
    if prompts[0] is not None and prompts[1] is not None:
        return _joined(sheet, prompts[0], scores, prompts[1], column)
    if len(scores.rows) != len(sheet.rows):
        raise OutcomesError(
            f"{scores.name}: {len(scores.rows)} scores for the {len(sheet.rows)} outcomes of {sheet.name}; "
            "give one for each, or a prompt column in both"
        )
    return [_number(scores, row, column) for row in scores.rows]


def _joined(sheet: Sheet, prompt: str, scores: Sheet, scored_prompt: str, column: str) -> list[float]:
    by_prompt: dict[str, float] = {}
    for row in scores.rows:
        value = _number(scores, row, column)
        if by_prompt.setdefault(row.values[scored_prompt], value) != value:
            raise OutcomesError(
                f"{scores.name}:{row.line}: a second score for the prompt {row.values[scored_prompt]!r:.60}; keep one"
            )
    for row in sheet.rows:
        if row.values[prompt] not in by_prompt:
            raise OutcomesError(
                f"{sheet.name}:{row.line}: {scores.name} has no score for the prompt {row.values[prompt]!r:.60}"
            )
    return [by_prompt[row.values[prompt]] for row in sheet.rows]


def _records(name: str, reader: Iterator[list[str]]) -> Iterator[tuple[int, list[str]]]:
    """Each record that is not blank, and the line where it begins. `reader` is one of the module csv."""
    while True:
        line: int = reader.line_num + 1  # type: ignore[attr-defined]
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise OutcomesError(f"{name}:{line}: not CSV: {error}") from error
        if fields:
            yield line, fields


def _number(sheet: Sheet, row: Row, column: str) -> float:
    text = row.values[column]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise OutcomesError(f"{sheet.name}:{row.line}: {column} is {text!r:.60}; expected a finite number")
    return value


def _right(sheet: Sheet, row: Row, column: str) -> float:
    text = row.values[column].strip()
    if text.lower() in _TRUE:
        return 1.0
    if text.lower() in _FALSE:
        return 0.0
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise OutcomesError(
            f"{sheet.name}:{row.line}: {column} is {text!r:.60}; expected true or false, or a number from 0 to 1"
        )
    return value
