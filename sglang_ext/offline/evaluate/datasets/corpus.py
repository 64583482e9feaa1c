"""Any prompts without answers, for fidelity: what `kvlift calibrate` reads, or a file of titled passages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sglang_ext.offline.corpus import read_prompts
from sglang_ext.offline.evaluate.datasets import records
from sglang_ext.offline.evaluate.datasets.items import Dropped, Item
from sglang_ext.offline.evaluate.errors import EvaluationError


def read(path: Path, dropped: Dropped) -> Iterator[Item]:
    """JSON lines of `messages` or `text`; of a `.json` array, each `title` and `text` as one prompt."""
    prompts = _passages(path, dropped) if path.suffix == ".json" else read_prompts(str(path))
    for number, record in enumerate(prompts, start=1):
        yield Item(f"{path.name}/{number}", path.stem, record, (), _unanswerable, "none", 0)


def _passages(path: Path, dropped: Dropped) -> Iterator[dict[str, Any]]:
    for record in records.read(path, dropped):
        yield {"text": f"{record.take('title', str)}\n{record.take('text', str)}"}


def _unanswerable(_text: str, _gold: tuple[str, ...]) -> float:
    raise EvaluationError("prompts of a corpus have no answers; measure their fidelity (--measure fidelity)")
