"""A lift between its fill and its insert."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Iterator

import torch

from sglang_ext.phases import Phases
from sglang_ext.plan import PrefillPlan
from sglang_ext.worker.cost import Choice
from sglang_ext.worker.executor import Work
from sglang_ext.worker.messages import LiftReq
from sglang_ext.worker.pool import Prefix, Where


@dataclass(eq=False)
class OpenLift:
    """A lift between its fill and its insert. `keep` holds the lock on `held` until it is closed.

    done: of the chosen positions, how many have been recomputed; fill: the layers that are still to be written.
    """

    request: LiftReq
    where: Where
    held: Prefix
    fresh: torch.Tensor
    plan: PrefillPlan
    block_bytes: int
    scores: torch.Tensor
    fill: Iterator[torch.Tensor]
    phases: Phases
    choice: Choice
    keep: ExitStack
    done: int = 0

    @property
    def end(self) -> int:
        """Where the lifted prefix ends; SGLang's own batch computes what comes after it."""
        return self.plan.fills[-1].stop

    @property
    def chosen(self) -> torch.Tensor:
        """int64: the plan's positions to compute before the prefix is published."""
        return self.plan.compute[self.plan.compute < self.end]

    def take(self, most: int) -> Work | None:
        """The next positions to compute, in ascending order; None where nothing is left."""
        positions = self.chosen[self.done : self.done + most]
        if not len(positions):
            return None
        self.done += len(positions)
        slots = torch.cat([self.held.slots, self.fresh])
        return Work(torch.tensor(self.request.ids)[positions], positions, slots, fill=self.fill)
