"""Where an evaluation's documents come from, and how prompts with them are prefilled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.planners import FULL, NAMES, NO_RECOMPUTE, planner_named
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT

NO_CACHE = "no_cache"  # the prompt without its documents: what the model knows by itself
PLAIN, MAPPED = "plain", "mapped"
METHODS = (NO_CACHE, *NAMES)
WITHOUT_BUDGET = (NO_CACHE, NO_RECOMPUTE, FULL)


@dataclass(frozen=True)
class Arm:
    """One rule (`random:SEED` for a seed) at one budget: tokens of each document for epic, else a share of them."""

    planner: str
    budget: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in METHODS:
            raise EvaluationError(f"method {self.planner!r} is not known; expected one of {', '.join(METHODS)}")
        if self.kind != NO_CACHE:
            planner_named(self.planner, self.budget)

    @property
    def kind(self) -> str:
        """The rule without its seed."""
        return self.planner.partition(":")[0]


@dataclass(frozen=True)
class Library:
    """Compiled documents of one kind, and the arms to run with them.

    name: plain, an adapter's or a pack's; domain: as rows show it, the same for the seeds of one adapter; method: plain, a Writer's method, or mapped; compiler: of the
    reading model, or of the source where maps take its documents over; key: all that the documents depend on.
    """

    name: str
    domain: str
    method: str
    compiler: Compiler
    arms: tuple[Arm, ...]
    key: dict[str, Any]
    maps: CrossModelMap | None = None

    def label(self, arm: Arm) -> str:
        """The method as rows show it: the rule for plain documents, else what made the documents."""
        if self.method == PLAIN:
            return arm.kind
        extra = "" if arm.kind in (NO_RECOMPUTE, RANK_DISAGREEMENT) else f"_{arm.kind}"
        return f"{self.method}{extra}"


def budgeted(kind: str, budget: float) -> float | None:
    """The budget as rows show it, None for a method that has none."""
    return None if kind in WITHOUT_BUDGET else budget


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)  # of document tokens, section 6
LEADING = (10.0, 30.0, 50.0, 70.0, 90.0)  # tokens of each document, section 6
RULES = tuple(name for name in NAMES if name not in (*WITHOUT_BUDGET, RANK_DISAGREEMENT))
