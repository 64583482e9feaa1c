"""The teacher: the base model's own answers and full-vocabulary logits, generated once, then read from disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from sglang_ext.documents.corpus import Corpus, Record
from sglang_ext.errors import DocumentError
from sglang_ext.identity import cache_folder, digest_fields
from sglang_ext.offline.executor import TransformersExecutor, Work

BATCH = 16
FORMAT = "1"


class Target(NamedTuple):
    """What the teacher says to one record. answer: n token ids; logits: [n, vocabulary], one row to predict each."""

    answer: list[int]
    logits: Tensor


class TeacherCache:
    """Targets of a corpus, one after the other, in a folder of two files.

    `logits.bin` holds the logits' bytes, mapped into memory; `answers.jsonl` the answers, a line each. A line is
    written after its logits, so whatever a kill leaves behind the last line counts for nothing.
    """

    def __init__(self, folder: Path, vocabulary: int, dtype: torch.dtype) -> None:
        """Raises DocumentError where the files are not such a cache."""
        self.folder, self._vocabulary, self._dtype = folder, vocabulary, dtype
        folder.mkdir(parents=True, exist_ok=True)
        self._answers: list[list[int]] = []
        self._starts = [0]  # rows of logits.bin
        self._recover()

    def __len__(self) -> int:
        return len(self._answers)

    def append(self, target: Target) -> None:
        """Adds the next record's target. Mutates the files."""
        rows = target.logits.detach().to("cpu", self._dtype).contiguous()
        with self._logits.open("ab") as file:
            file.write(rows.view(torch.uint8).numpy().tobytes())
        with self._lines.open("a") as file:
            file.write(json.dumps(target.answer) + "\n")
        self._note(target.answer)

    def __getitem__(self, index: int) -> Target:
        first, last = self._starts[index], self._starts[index + 1]
        count = (last - first) * self._vocabulary * self._dtype.itemsize
        mapped = numpy.memmap(self._logits, numpy.uint8, mode="c", offset=first * self._row_bytes, shape=(count,))
        return Target(self._answers[index], torch.from_numpy(mapped).view(self._dtype).view(-1, self._vocabulary))

    @property
    def _logits(self) -> Path:
        return self.folder / "logits.bin"

    @property
    def _lines(self) -> Path:
        return self.folder / "answers.jsonl"

    @property
    def _row_bytes(self) -> int:
        return self._vocabulary * self._dtype.itemsize

    def _note(self, answer: list[int]) -> None:
        self._answers.append(answer)
        self._starts.append(self._starts[-1] + len(answer))

    def _recover(self) -> None:
        """Reads the lines; cuts off what a kill left half written."""
        self._logits.touch()
        self._lines.touch()
        whole = 0
        for line in self._lines.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            try:
                answer = json.loads(line)
            except json.JSONDecodeError as error:
                raise DocumentError(f"{self._lines} cannot be read: {error}; delete {self.folder}") from error
            self._note(answer)
            whole += len(line)
        size = self._starts[-1] * self._row_bytes
        if self._logits.stat().st_size < size:
            raise DocumentError(f"{self._logits} is shorter than its answers say; delete {self.folder}")
        os.truncate(self._logits, size)
        os.truncate(self._lines, whole)


def open_cache(executor: TransformersExecutor, corpus: Corpus, limit: int) -> TeacherCache:
    """The cache of this model's answers of at most `limit` tokens to this corpus, in kvlift's cache folder."""
    dtype = executor.model.dtype
    key = digest_fields([FORMAT, executor.identity.model, corpus.digest, str(limit), str(dtype)])
    return TeacherCache(cache_folder() / "teachers" / key[:32], executor.model.config.vocab_size, dtype)


def teach(
    executor: TransformersExecutor,
    records: Sequence[Record],
    cache: TeacherCache,
    limit: int,
    stop: Sequence[int],
    seen: Callable[[int], None],
) -> None:
    """Adds the targets that the cache lacks. seen: called with the number of targets that are there."""
    seen(len(cache))
    while len(cache) < len(records):
        batch = records[len(cache) : len(cache) + BATCH]
        for target in _targets(executor, [record.prompt for record in batch], limit, stop):
            cache.append(target)
        seen(len(cache))


def _targets(
    executor: TransformersExecutor, prompts: Sequence[list[int]], limit: int, stop: Sequence[int]
) -> list[Target]:
    """Greedy answers of full prompts, with the token that ends them, and the logits that predict each token."""
    rows, logits = executor.prefill(prompts, spare=limit)
    texts = executor.greedy(rows, logits, limit, stop)
    work = []
    for row, ids, text in zip(rows, prompts, texts, strict=True):
        # An answer that the limit cut off has no end of its own to learn.
        read = torch.tensor([ids[-1], *(text[:-1] if len(text) == limit else text)])
        work.append(Work(row, read, torch.arange(len(ids) - 1, len(ids) - 1 + len(read))))
    targets = []
    for text, states in zip(texts, executor.compute(work), strict=True):
        logits = executor.logits(states)
        end = [] if len(text) == limit else [max(stop, key=logits[-1].tolist().__getitem__)]
        targets.append(Target([*text, *end], logits))
    return targets
