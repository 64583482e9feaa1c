"""What to evaluate: from options, or by the name of a preset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.offline import family
from sglang_ext.offline.evaluate.arms import SELECTORS, Arm, arms
from sglang_ext.offline.evaluate.errors import EvaluationError


@dataclass(frozen=True)
class Direction:
    """One target and its pairs: (pack folder, source model, arms). The first pair is the one that is compared."""

    target: str
    pairs: Sequence[tuple[str, str, tuple[Arm, ...]]]


@dataclass(frozen=True)
class Plan:
    """A dataset, one direction, and the other way round where there is one; shown_rho: of bars, layers and strip."""

    dataset: str
    forward: Direction
    reverse: Direction | None
    shown_rho: float


RHOS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
COMPARED_AT = (0.2, 0.3, 0.5)
COVERAGES = (0.5, 0.6, 0.7)
SHOWN_RHO = 0.3  # of bars, layers and strip
_FAMILY = Path(family.__path__[0])
_SOURCES = {"tiny-small-to-large": "small", "tiny-small-to-large-head": "small", "tiny-medium-to-large": "medium"}
_REVERSE = "tiny-large-to-small"


@dataclass(frozen=True)
class Options:
    """What the command line says; what is empty or None takes the defaults above."""

    data: str | None = None
    target: str | None = None
    packs: Sequence[str] = ()
    selectors: Sequence[str] = ()
    rhos: Sequence[float] = ()
    compared_at: Sequence[float] = ()
    coverages: Sequence[float] = ()
    seeds: int = 1


def plan_of(options: Options) -> Plan:
    """The same arms for each pack. Raises EvaluationError for options that are missing or malformed."""
    for name, value in (("--data", options.data), ("--target", options.target), ("--pack", options.packs)):
        if not value:
            raise EvaluationError(
                f"{name} is missing; give --data, --target and --pack FOLDER=SOURCE, or --preset family"
            )
    compared_at = tuple(options.compared_at) or COMPARED_AT
    wanted = arms(options.selectors or SELECTORS, options.rhos or RHOS, compared_at, options.coverages, options.seeds)
    pairs = [(*_pack_and_source(text), wanted) for text in options.packs]
    shown = min(compared_at, key=lambda rho: abs(rho - SHOWN_RHO))
    return Plan(options.data, Direction(options.target, pairs), None, shown)


def preset(name: str, data: str | None) -> Plan:
    """A plan by name; `data` in the place of its own dataset. Raises EvaluationError for an unknown name."""
    if name != "family":
        raise EvaluationError(f"preset {name!r} is not known; expected family")
    return family_plan(data or "family:500")


def _pack_and_source(text: str) -> tuple[str, str]:
    folder, _, source = text.partition("=")
    if not folder or not source:
        raise EvaluationError(f"--pack {text!r}: expected PACK_FOLDER=SOURCE_MODEL")
    return folder, source


def family_plan(data: str, packs: Path = _FAMILY / "packs") -> Plan:
    """The tiny family: every selector on small to large, and the other packs that there are at every rho.

    Raises EvaluationError where `packs` lacks the first of them.
    """
    whole = arms(SELECTORS, RHOS, COMPARED_AT, COVERAGES, seeds=1)
    line = arms((), RHOS, (), (), seeds=1)
    found = [name for name in _SOURCES if (packs / name / "pack.json").exists()]
    if not found or found[0] != next(iter(_SOURCES)):
        raise EvaluationError(f"{packs} holds no pack {next(iter(_SOURCES))!r}; calibrate it first")
    forward = Direction(
        _model("large"),
        [(str(packs / name), _model(_SOURCES[name]), line if at else whole) for at, name in enumerate(found)],
    )
    reverse = None
    if (packs / _REVERSE / "pack.json").exists():
        reverse = Direction(_model("small"), [(str(packs / _REVERSE), _model("large"), line)])
    return Plan(data, forward, reverse, SHOWN_RHO)


def _model(size: str) -> str:
    return str(_FAMILY / "models" / f"kvlift-tiny-{size}")
