"""GSM8K: `question` and `answer`, which ends in `#### N`. Chain of thought, exact match on the last number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sglang_ext.offline.evaluate.datasets import records, scoring
from sglang_ext.offline.evaluate.datasets.items import Dropped, Item, user
from sglang_ext.offline.evaluate.errors import EvaluationError

MAX_NEW_TOKENS = 1024  # section 4.1
_PROMPT = (
    "{question}\n\nWork this out step by step. Then give the result on a line of its own, as a plain number without "
    "its unit, in the form\nAnswer: <number>"
)


def read(path: Path, dropped: Dropped) -> Iterator[Item]:
    """Items in the order of the file. Raises EvaluationError for an answer without `####` and a number."""
    for number, record in enumerate(records.read(path, dropped), start=1):
        question, answer = record.take("question", str), record.take("answer", str)
        _, mark, gold = answer.rpartition("####")
        if not mark or scoring.last_number(gold) is None:
            raise EvaluationError(f"{record.where}: `answer` must end in `#### N`, found {answer[-40:]!r}")
        yield Item(
            f"{path.name}/{number}", "gsm8k", user(_PROMPT.format(question=question)), (gold.strip(),),
            scoring.same_number, "accuracy", MAX_NEW_TOKENS,
        )  # fmt: skip
