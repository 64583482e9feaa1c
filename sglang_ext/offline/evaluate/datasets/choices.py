"""Questions with choices: MMLU-Redux (0-shot, the letter alone) and ARC (0-shot, chain of thought)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from sglang_ext.offline.evaluate.datasets import records, scoring
from sglang_ext.offline.evaluate.datasets.items import Dropped, Item, user
from sglang_ext.offline.evaluate.datasets.records import Record
from sglang_ext.offline.evaluate.errors import EvaluationError

LETTERS = "ABCDEFGHIJ"
_DIRECT = "Reply with the letter of the right choice and nothing else."
_REASONED = "Think step by step. Then name the right choice on a line of its own, in the form\nAnswer: <label>"
_DIRECT_TOKENS, _REASONED_TOKENS = 8, 1024


def read_mmlu_redux(path: Path, dropped: Dropped) -> Iterator[Item]:
    """The subjects of a folder of CSV files, or of one file.

    Kept: rows whose `error_type` is `ok` in any spelling, and those with a wrong ground truth whose
    `correct_answer` names one choice by index or letter, which then is the gold one. All others are counted in
    `dropped` under their error type. Raises EvaluationError for a row that is broken.
    """
    files = sorted(path.glob("*.csv")) if path.is_dir() else [path]
    if not files:
        raise EvaluationError(f"{path} holds no .csv files")
    for file in files:
        for number, record in enumerate(records.read(file, dropped), start=1):
            texts = record.literal("choices")
            question, error = record.take("question", str), record.take("error_type", str)
            if not isinstance(texts, list) or not 2 <= len(texts) <= len(LETTERS):
                raise EvaluationError(f"{record.where}: expected 2 to {len(LETTERS)} choices, found {texts!r}")
            gold = _mmlu_gold(record, error, len(texts))
            if gold is None:
                dropped[f"mmlu-redux: {_plain(error)}"] += 1
                continue
            task = file.stem.removeprefix("mmlu_")
            yield _item(f"{task}/{number}", task, question, LETTERS[: len(texts)], texts, LETTERS[gold], _DIRECT)


def _mmlu_gold(record: Record, error: str, count: int) -> int | None:
    """The index of the gold choice, or None for a row that the dataset's authors doubt."""
    if _plain(error) == "ok":
        index = _index(record.take("answer", str), count)
        if index is None:
            raise EvaluationError(f"{record.where}: `answer` is {record.fields['answer']!r}, expected 0 to {count - 1}")
        return index
    return _index(record.fields.get("correct_answer", ""), count) if _plain(error) == "wrong groundtruth" else None


def _index(text: str, count: int) -> int | None:
    text = text.strip()
    index = int(text) if text.isdecimal() else LETTERS.find(text) if len(text) == 1 else -1
    return index if 0 <= index < count else None


def _plain(error: str) -> str:
    return error.strip().lower().replace("_", " ")


def read_arc(path: Path, dropped: Dropped) -> Iterator[Item]:
    """ARC as the hub has it, as AI2 published it (nested `question`), or CSV of either.

    Raises EvaluationError where the choices cannot be read or the key is none of their labels.
    """
    for number, record in enumerate(records.read(path, dropped), start=1):
        fields = record.fields
        question, labels, texts = _arc_question(record)
        key = record.take("answerKey" if "answerKey" in fields else "AnswerKey", str).strip()
        if key not in labels:
            raise EvaluationError(f"{record.where}: the key {key!r} is none of the labels {', '.join(labels)}")
        name = record.name("id", "questionID", default=number)
        yield _item(f"{path.stem}/{name}", path.stem, question, labels, texts, key, _REASONED)


def _arc_question(record: Record) -> tuple[str, list[str], list[str]]:
    """Question, labels, texts."""
    question = record.take("question", (str, dict))
    if isinstance(question, dict):
        nested = Record(record.where, question)
        question, choices = nested.take("stem", str), nested.take("choices", list)
    elif "choices" in record.fields:
        raw = record.fields["choices"]
        # Tables that pandas wrote hold arrays in the place of lists.
        plain = (
            re.sub(r"array\((\[.*?\])(?:, dtype=\w+)?\)", r"\1", raw, flags=re.DOTALL) if isinstance(raw, str) else raw
        )
        choices = Record(record.where, {"choices": plain}).literal("choices")
    else:
        stem, *parts = re.split(r"\(([A-E1-5])\)\s*", question)
        question, choices = stem.strip(), {"label": parts[::2], "text": [text.strip() for text in parts[1::2]]}
    if isinstance(choices, list):
        pairs = [Record(record.where, one) if isinstance(one, dict) else Record(record.where, {}) for one in choices]
        choices = {name: [pair.take(name, str) for pair in pairs] for name in ("label", "text")}
    labels, texts = choices.get("label"), choices.get("text")
    if not (isinstance(labels, list) and isinstance(texts, list) and len(labels) == len(texts) > 1):
        raise EvaluationError(f"{record.where}: expected at least two choices, each with `label` and `text`")
    return question, labels, texts


def _item(
    name: str, task: str, question: str, labels: Sequence[str], texts: Sequence[str], gold: str, ask: str
) -> Item:
    listed = "\n".join(f"{label}. {text}" for label, text in zip(labels, texts))
    limit = _DIRECT_TOKENS if ask is _DIRECT else _REASONED_TOKENS
    return Item(
        name, task, user(f"{question.strip()}\n\n{listed}\n\n{ask}"), (gold,), scoring.same_label, "accuracy", limit
    )
