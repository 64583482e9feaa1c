"""What to evaluate: from options, or by the name of a preset."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from sglang_ext.documents.planners import EPIC, FULL, NO_RECOMPUTE
from sglang_ext.offline import family
from sglang_ext.offline.documents.libraries import LEADING, NO_CACHE, RULES, SHARES, Arm
from sglang_ext.offline.documents.timing import Clock
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.transfer.selectors import RANDOM, RANK_DISAGREEMENT

MAP_SHARES = (0.0, 0.1, 0.2, 0.3, 0.5)
ITEMS = 300  # of the tiny task in the preset; biographies and needles, which methods hardly tell apart, get fewer
FEWER_ITEMS = 100
ATTENTION_PROMPTS = 100  # of each task, as in the paper


@dataclass(frozen=True)
class Study:
    """One reading model over datasets.

    adapters: folders of Writers; packs: (pack folder, source model) whose source's documents are mapped; rules: online
    planners to sweep, over `shares` of the documents' tokens (epic over `leading` tokens of each); map_shares: budgets of
    rank disagreement, and of random, over mapped documents; seeds: of random; attention: prompts of each task whose
    attention is compared, 0 for none.
    """

    model: str
    data: tuple[str, ...]
    adapters: tuple[str, ...] = ()
    packs: tuple[tuple[str, str], ...] = ()
    rules: tuple[str, ...] = RULES
    shares: tuple[float, ...] = SHARES
    leading: tuple[float, ...] = LEADING
    map_shares: tuple[float, ...] = MAP_SHARES
    seeds: int = 1
    attention: int = ATTENTION_PROMPTS

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in RULES:
                raise EvaluationError(f"rule {rule!r} is not known; expected some of {', '.join(RULES)}")

    @property
    def plain_arms(self) -> tuple[Arm, ...]:
        """Full, without recompute, without documents, and the sweep of each rule."""
        made = [Arm(FULL), Arm(NO_RECOMPUTE), Arm(NO_CACHE)]
        for rule in self.rules:
            budgets = self.leading if rule == EPIC else self.shares
            made += [Arm(one, budget) for one in self._seeded(rule) for budget in budgets]
        return tuple(dict.fromkeys(made))

    @property
    def mapped_arms(self) -> tuple[Arm, ...]:
        wanted = [(rule, share) for rule in (RANK_DISAGREEMENT, RANDOM) for share in self.map_shares]
        made = [Arm(one, share) for rule, share in wanted if share or rule != RANDOM for one in self._seeded(rule)]
        return tuple(dict.fromkeys(made))

    def _seeded(self, rule: str) -> list[str]:
        return [f"{RANDOM}:{seed}" for seed in range(self.seeds)] if rule == RANDOM else [rule]


@dataclass(frozen=True)
class Plan:
    """What one run of the command does. clock: what to time besides, None for nothing."""

    studies: tuple[Study, ...]
    clock: Clock | None = None


def pack_and_source(text: str) -> tuple[str, str]:
    """`PACK_FOLDER=SOURCE_MODEL`. Raises EvaluationError for anything else."""
    folder, _, source = text.partition("=")
    if not folder or not source:
        raise EvaluationError(f"--pack {text!r}: expected PACK_FOLDER=SOURCE_MODEL")
    return folder, source


_FAMILY = Path(family.__path__[0])
# Fitted to documents by themselves, and to whole prompts: what the maps were fitted to matters.
_PACKS = ("tiny-small-to-large-documents", "tiny-small-to-large")
_TINY_LEADING = (1.0, 2.0, 3.0, 5.0)  # documents of the tiny task have 5 to 15 tokens


def preset(name: str, limit: int | None) -> Plan:
    """A plan by name. limit: items of each task, by default ITEMS. Raises EvaluationError for an unknown name."""
    if name != "tiny":
        raise EvaluationError(f"preset {name!r} is not known; expected tiny")
    limit, fewer = limit or ITEMS, min(limit or ITEMS, FEWER_ITEMS)
    base, adapters = _FAMILY / "models" / "kvlift-tiny-documents", _FAMILY / "adapters"
    main = Study(
        str(base), (f"documents-6x1:{limit}",), tuple(str(one) for one in sorted(adapters.glob("*")) if one.is_dir()),
        leading=_TINY_LEADING,
    )  # fmt: skip
    others = replace(
        main, rules=(),
        data=tuple(f"documents-{layout}:{limit}" for layout in ("3x2", "2x3", "8x1", "4x2", "inline", "cut")),
    )  # fmt: skip
    large = Study(
        str(_FAMILY / "models" / "kvlift-tiny-large"), (f"biographies:{fewer}", f"sums:{fewer}", f"needles:{fewer}"), rules=(),
        packs=tuple((str(_FAMILY / "packs" / pack), str(_FAMILY / "models" / "kvlift-tiny-small")) for pack in _PACKS),
    )  # fmt: skip
    return Plan((main, others, large), Clock())
