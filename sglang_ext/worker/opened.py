"""Jobs between their fill and their end."""

from __future__ import annotations

from array import array
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Callable, ClassVar, Iterator

import torch

from sglang_ext.phases import Phases
from sglang_ext.plan import PrefillPlan
from sglang_ext.worker.cost import Choice
from sglang_ext.worker.executor import Work
from sglang_ext.worker.pool import Pool, Prefix, Where
from sglang_ext.worker.tails import Tail


@dataclass(eq=False, kw_only=True)
class OpenJob:
    """A prompt, or the part of it that is to be filled and computed here.

    tokens: int64 [n]; held: the slots of its first positions, which lie in the tree already; fresh: those of the
    others; chosen: int64, ascending, what is to be computed, and `done` of them are; fill: writes one more layer's
    filled entries each time it is advanced; keep: holds the locks on what the job builds upon until it is closed;
    writing: makes the context in which the model has other weights, None for its own; soft: embeddings of soft tokens
    (executor.py), where there are any; tail: so many of the chosen ones, the prompt's last, are no part of what is
    published (tails.py); logits: [vocabulary], of the last of the chosen ones, once it is computed.
    """

    phase: ClassVar[str] = "recompute"
    """Where the time of the forwards goes."""

    request: Any
    tokens: torch.Tensor
    held: Prefix
    fresh: torch.Tensor
    chosen: torch.Tensor
    phases: Phases
    fill: Iterator[Any] = field(default_factory=lambda: iter(()))
    keep: ExitStack = field(default_factory=ExitStack)
    writing: Callable[[], AbstractContextManager[None]] | None = None
    soft: torch.Tensor | None = None
    tail: int = 0
    logits: torch.Tensor | None = None
    done: int = 0

    @property
    def slots(self) -> torch.Tensor:
        """int64, of every position."""
        return torch.cat([self.held.slots, self.fresh])

    def take(self, most: int) -> Work | None:
        """The next positions to compute, in ascending order; None where nothing is left."""
        positions = self.chosen[self.done : self.done + most]
        if not len(positions):
            return None
        self.done += len(positions)
        return Work(self.tokens[positions], positions, self.slots, fill=self.fill, soft=self.soft)

    def part_with_tail(self, pool: Pool) -> Tail | None:
        """Takes the tail out of the pool, once all is computed, and frees its slots; None where there is none."""
        if not self.tail:
            return None
        assert self.logits is not None, "all is computed"
        start = len(self.tokens) - self.tail
        slots = self.slots[start:]
        tail = Tail(array("q", self.tokens.tolist()), start, pool.read(slots[: self.tail]), self.logits)
        self.fresh = self.fresh[: start - self.held.length]
        pool.free(slots)
        return tail


@dataclass(eq=False, kw_only=True)
class OpenLift(OpenJob):
    """A lift. `chosen` are the plan's positions to compute before the prefix is published."""

    where: Where
    plan: PrefillPlan
    block_bytes: int
    scores: torch.Tensor
    choice: Choice

    @property
    def end(self) -> int:
        """Where the lifted prefix ends; SGLang's own batch computes what comes after it."""
        return self.plan.fills[-1].stop
