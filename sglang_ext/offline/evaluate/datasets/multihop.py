"""Questions over several passages, scored by token F1: HotpotQA, 2WikiMultihopQA, MuSiQue and LongBench files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ext.offline.evaluate.datasets import records, scoring
from sglang_ext.offline.evaluate.datasets.items import Dropped, Item, user
from sglang_ext.offline.evaluate.datasets.records import Record
from sglang_ext.offline.evaluate.errors import EvaluationError

MAX_NEW_TOKENS = {"qasper": 128, "multifieldqa_en": 64}  # LongBench's answers that are not a name or a date
_USUAL_TOKENS = 32
_PROMPT = (
    "Read the passages and answer the question from them alone. Give the shortest answer that is complete, with no "
    "other words.\n\n{passages}Question: {question}\nAnswer:"
)
_END = "\n"  # of a passage, which holds it: its token is the same alone and between two passages; two newlines are not


def read(path: Path, dropped: Dropped) -> Iterator[Item]:
    """Items in the order of the file; the task is LongBench's `dataset`, else the file's name.

    Questions come as `question` or `input`; passages as `context` (text, [title, sentences] pairs, or the hub's
    columns `title` and `sentences`) or as `paragraphs`; answers as `answer`, `answers` and `answer_aliases`.
    Raises EvaluationError for a record without one of the three.
    """
    for number, record in enumerate(records.read(path, dropped), start=1):
        fields = record.fields
        question = record.take("question" if "question" in fields else "input", str)
        task = str(fields.get("dataset") or path.stem)
        passages = tuple(f"{one}{_END}" for one in _passages(record))
        text = _PROMPT.format(passages="".join(passages), question=question)
        name = record.name("_id", "id", default=number)
        limit = MAX_NEW_TOKENS.get(task.removesuffix("_e"), _USUAL_TOKENS)
        yield Item(f"{task}/{name}", task, user(text), _gold(record), scoring.token_f1, "f1", limit, passages)


def _gold(record: Record) -> tuple[str, ...]:
    answers = record.take("answers" if "answers" in record.fields else "answer", (str, list))
    listed = [answers] if isinstance(answers, str) else answers
    listed = [*listed, *(record.fields.get("answer_aliases") or [])]
    if not listed or not all(isinstance(one, str) and one for one in listed):
        raise EvaluationError(f"{record.where}: expected one or more answers as text, found {answers!r}")
    return tuple(listed)


def _passages(record: Record) -> list[str]:
    if "paragraphs" in record.fields:
        listed = record.take("paragraphs", list)
        parts = [Record(record.where, one if isinstance(one, dict) else {}) for one in listed]
        return [_titled(one.fields.get("title"), _text(one.fields), record.where) for one in parts]
    context = record.take("context", (str, list, dict))
    if isinstance(context, str) and not context.lstrip().startswith(("[[", '{"title"')):
        return [context]
    context = record.literal("context")
    if isinstance(context, dict):
        columns = Record(record.where, context)
        context = list(zip(columns.take("title", list), columns.take("sentences", list)))
    try:
        return [_titled(title, " ".join(s.strip() for s in lines), record.where) for title, lines in context]
    except (TypeError, ValueError, AttributeError) as error:
        raise EvaluationError(f"{record.where}: `context` must hold pairs of a title and its sentences") from error


def _text(fields: dict[str, Any]) -> Any:
    """MuSiQue's name for it, or the usual one."""
    return fields.get("paragraph_text") or fields.get("text")


def _titled(title: Any, text: Any, where: str) -> str:
    if not (isinstance(title, str) and isinstance(text, str)):
        raise EvaluationError(f"{where}: a passage needs a title and its text")
    return f"{title}\n{text}"
