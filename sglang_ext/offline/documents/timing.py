"""Cache-hit time to the first token against a full prefill, for documents of growing length: the text does not matter."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from statistics import median

from pydantic import BaseModel, ConfigDict

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.link import Span
from sglang_ext.documents.planners import NO_RECOMPUTE
from sglang_ext.offline.documents.flops import OnlineFlops
from sglang_ext.offline.documents.libraries import PLAIN, Arm, Library
from sglang_ext.offline.documents.run import timed_prefill
from sglang_ext.offline.evaluate.run import Model

INLINE_BEFORE = 16  # of the inline tokens, those before the documents


@dataclass(frozen=True)
class Clock:
    """What to time on the target of a load pair's shape. lengths: tokens of each document; inline: tokens besides."""

    shape: str = "default"
    documents: int = 4
    lengths: tuple[int, ...] = (128, 256, 512)
    inline: int = 64
    rounds: int = 3


class TimingRow(BaseModel):
    """One length. Times are medians of rounds in which the two take turns; ratio: of full to linked, the paired median."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: str
    documents: int
    tokens: int
    inline: int
    full_ms: float
    linked_ms: float
    ratio: float
    full_flops: int
    linked_flops: int
    rounds: int


def measure(clock: Clock, model: Model, tick: Callable[[], None]) -> Iterator[TimingRow]:
    """A row for each length, as they come. Calls `tick` after each round."""
    executor, rng = model.executor, random.Random(0)
    vocabulary = executor.model.config.vocab_size
    library = Library(PLAIN, PLAIN, PLAIN, Compiler(executor), (), {})
    flops = OnlineFlops.of(executor, None)

    def text(tokens: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(tokens)]

    for length in clock.lengths:
        texts = [text(length) for _ in range(clock.documents)]
        before, query = text(INLINE_BEFORE), text(clock.inline - INLINE_BEFORE)
        documents = [document for one in texts for document in library.compiler.compile([one])]
        sides: tuple[list[Span], list[Span]] = ([[*before, *chain(*texts), *query]], [before, *documents, query])
        times: tuple[list[float], list[float]] = ([], [])
        counts = []
        for _ in range(clock.rounds):
            counts = []
            for spans, own in zip(sides, times):
                cache, _, ms = timed_prefill(executor, spans, Arm(NO_RECOMPUTE), library)
                own.append(ms)
                counts.append(flops.count(cache.linked, NO_RECOMPUTE))
            tick()
        full, linked = times
        yield TimingRow(
            shape=clock.shape, documents=clock.documents, tokens=length, inline=clock.inline,
            full_ms=round(median(full), 1), linked_ms=round(median(linked), 1),
            ratio=round(median(a / b for a, b in zip(full, linked)), 2), full_flops=counts[0], linked_flops=counts[1],
            rounds=clock.rounds,
        )  # fmt: skip
