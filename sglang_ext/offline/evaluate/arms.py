"""The arms of an evaluation: which cache the answers are decoded from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.oracles import LAYER_PREFIX, ORACLES
from sglang_ext.transfer.selectors import NAMES, RANDOM, RANK_DISAGREEMENT, Budget, budget_of

SELECTORS = (*NAMES, *ORACLES, LAYER_PREFIX)


@dataclass(frozen=True)
class Arm:
    """A lift with one selector (`random:SEED` for a seed) and one budget: rho or, where given, a coverage."""

    selector: str
    rho: float = 0.0
    coverage: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in SELECTORS:
            raise EvaluationError(f"selector {self.selector!r} is not known; expected one of {', '.join(SELECTORS)}")
        for name, share in (("rho", self.rho), ("coverage", self.coverage)):
            if share is not None and not 0 <= share <= 1:
                raise EvaluationError(f"{name} must lie in [0, 1], got {share}")
        if self.coverage is not None and self.kind != RANK_DISAGREEMENT:
            raise EvaluationError(f"coverage is a share of the rank disagreement; {self.selector} takes a rho")

    @property
    def kind(self) -> str:
        """The selector without its seed."""
        return self.selector.partition(":")[0]

    @property
    def budget(self) -> Budget:
        return budget_of(self.rho, self.coverage)


def arms(
    selectors: Iterable[str],
    rhos: Iterable[float],
    compared_at: Iterable[float],
    coverages: Iterable[float],
    seeds: int,
) -> tuple[Arm, ...]:
    """Rank disagreement at all of `rhos` and `coverages`, the other selectors at `compared_at`; no arm twice.

    rho = 0 and all of `compared_at` are always among rank disagreement's, to measure gaps against. `random` becomes
    `random:0` to `random:SEEDS-1`.
    """
    wanted = sorted({0.0, *rhos, *compared_at})
    made = [Arm(RANK_DISAGREEMENT, rho) for rho in wanted]
    made += [Arm(RANK_DISAGREEMENT, coverage=share) for share in sorted(set(coverages))]
    for name in dict.fromkeys(selectors):
        made += [Arm(one, rho) for one in _seeded(name, seeds) for rho in sorted(set(compared_at)) if rho > 0]
    return tuple(dict.fromkeys(made))


def _seeded(name: str, seeds: int) -> Iterator[str]:
    if name == RANDOM:
        yield from (f"{RANDOM}:{seed}" for seed in range(seeds))
    else:
        yield name
