"""Times native prefill and the lift of the same prompts in one process, in turn.

As in the paper, the source's block is there before the clock starts (section 4.6): a cascade's small model has
already answered. Both sides run through the same executor, and so with the same attention.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import PlanError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.offline.bench.ceiling import Costs
from sglang_ext.offline.bench.rows import BenchRow
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.phases import Phases
from sglang_ext.plan import budget_size
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, Fraction, scorer_named

WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Sweep:
    """Every pairing of prompt length and batch, each at every budget. Raises PlanError for one out of range."""

    tokens: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    rhos: tuple[float, ...] = (0.0, 0.2, 0.3, 0.5)
    rounds: int = 3

    def __post_init__(self) -> None:
        for what, given in (("tokens", self.tokens), ("batch", self.batches), ("rho", self.rhos)):
            if not given:
                raise PlanError(f"{what}: expected at least one value")
        for rho in self.rhos:
            budget_size(rho, 1)
        if min(self.tokens) < 2:
            raise PlanError(f"tokens {min(self.tokens)}: a lift needs a prompt of at least 2 tokens")
        for what, least in (("batch", min(self.batches)), ("rounds", self.rounds)):
            if least < 1:
                raise PlanError(f"{what} {least}: expected at least 1")

    @property
    def cases(self) -> list[tuple[int, int]]:
        """(tokens, batch), the short ones first."""
        return [(tokens, batch) for tokens in sorted(self.tokens) for batch in sorted(self.batches)]

    def operations(self, costs: Costs) -> float:
        """Floating-point operations of the timed calls, for an estimate of the time that is left."""
        return sum(self.case_operations(costs, tokens, batch) for tokens, batch in self.cases)

    def case_operations(self, costs: Costs, tokens: int, batch: int) -> float:
        native = costs.native(tokens)
        return self.rounds * batch * (native + sum(native / costs.ceiling_frontier(tokens, rho) for rho in self.rhos))


@dataclass(frozen=True)
class Subject:
    """A loaded pair under a name."""

    name: str
    source: TransformersExecutor
    target: TransformersExecutor
    maps: CrossModelMap
    costs: Costs

    @classmethod
    def load(cls, name: str, source: Path, target: Path, pack: Path, device: str, dtype: torch.dtype) -> Subject:
        """The maps of a bench-only pack run in the models' dtype. Raises PackError for a pack of other models."""
        loaded = Pack.load(pack, device)
        for folder, check in ((source, loaded.check_source), (target, loaded.check_target)):
            check(ModelIdentity.from_folder(folder), KVGeometry.from_folder(folder))
        maps = _cast(loaded.maps, dtype) if loaded.manifest.bench_only else loaded.maps
        left, right = (TransformersExecutor.from_folder(folder, device, dtype) for folder in (source, target))
        return cls(name, left, right, maps, Costs.of(right, maps))

    def check(self, sweep: Sweep) -> None:
        """Raises PlanError for prompts longer than either model's context."""
        for role, one in (("source", self.source), ("target", self.target)):
            context = one.model.config.max_position_embeddings
            if max(sweep.tokens) > context:
                raise PlanError(
                    f"tokens {max(sweep.tokens)}: the {role} of {self.name!r} has a context of {context}; "
                    "ask for shorter prompts"
                )


class Measured(NamedTuple):
    """One lift: milliseconds in all, and by phase."""

    ms: float
    phases_ms: dict[str, float]


class Prompts:
    """A batch of random prompts of one length and their source blocks; runs either side on them."""

    def __init__(self, subject: Subject, tokens: int, batch: int) -> None:
        vocabulary = min(one.model.config.vocab_size for one in (subject.source, subject.target))
        generator = torch.Generator().manual_seed(tokens)
        self._subject = subject
        self._ids = torch.randint(0, vocabulary, (batch, tokens), generator=generator).tolist()
        self._blocks = [_block(subject.source, ids) for ids in self._ids]
        self._scorer = scorer_named(RANK_DISAGREEMENT)
        self._on_gpu = subject.target.model.device.type == "cuda"

    def native(self) -> float:
        """Milliseconds of a native prefill of the batch."""
        return self._timed(lambda: self._subject.target.prefill(self._ids))

    def lift(self, rho: float) -> Measured:
        """A lift of the batch at one budget."""
        phases = Phases()
        ms = self._timed(lambda: self._lift(rho, phases))
        if self._on_gpu:
            # Kernels run behind the host's back: phases need a lift of their own, one that waits at each.
            phases = _WaitingPhases()
            self._lift(rho, phases)
        return Measured(ms, phases.ms)

    def _lift(self, rho: float, phases: Phases) -> None:
        subject = self._subject
        subject.target.lift(self._ids, self._blocks, subject.maps, self._scorer, Fraction(rho), phases=phases)

    def _timed(self, operation: Callable[[], object]) -> float:
        self._wait()
        started = time.perf_counter()
        operation()
        self._wait()
        return (time.perf_counter() - started) * 1e3

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


def measure(subject: Subject, sweep: Sweep, tick: Callable[[float], None]) -> Iterator[BenchRow]:
    """The rows of each case as soon as it is done. Calls `tick` with the operations of each round.

    Raises PlanError for prompts that the models cannot hold.
    """
    subject.check(sweep)
    alternate(Prompts(subject, min(WARM_UP_TOKENS, *sweep.tokens), 1), sweep.rhos, rounds=1, tick=lambda: None)
    for tokens, batch in sweep.cases:
        share = sweep.case_operations(subject.costs, tokens, batch) / sweep.rounds
        prompts = Prompts(subject, tokens, batch)
        natives, lifts = alternate(prompts, sweep.rhos, sweep.rounds, partial(tick, share))
        for rho, measured in lifts.items():
            yield _row(subject, tokens, batch, rho, natives, measured)


def alternate(
    prompts: Prompts, rhos: Sequence[float], rounds: int, tick: Callable[[], None]
) -> tuple[list[float], dict[float, list[Measured]]]:
    """Rounds of native prefill and a lift at each budget, so that both meet the same machine.

    Every second round runs backwards: what drifts in time favours no side.
    """
    natives: list[float] = []
    lifts: dict[float, list[Measured]] = {rho: [] for rho in rhos}
    for turn in range(rounds):
        for rho in (None, *rhos) if turn % 2 == 0 else (*reversed(rhos), None):
            if rho is None:
                natives.append(prompts.native())
            else:
                lifts[rho].append(prompts.lift(rho))
        tick()
    return natives, lifts


def _row(
    subject: Subject, tokens: int, batch: int, rho: float, natives: Sequence[float], lifts: Sequence[Measured]
) -> BenchRow:
    totals = [one.ms for one in lifts]
    native_ms, lift_ms = median(natives), median(totals)
    ceiling = subject.costs.ceiling_frontier(tokens, rho)
    return BenchRow(
        shape=subject.name, tokens=tokens, batch=batch, rho=rho,
        native_ms=round(native_ms, 3), lift_ms=round(lift_ms, 3), speedup=round(native_ms / lift_ms, 4),
        ceiling_dense=round(subject.costs.ceiling_dense(tokens, rho), 4), ceiling_frontier=round(ceiling, 4),
        share_of_ceiling=round(native_ms / lift_ms / ceiling, 4),
        phases_ms={name: round(median(one.phases_ms[name] for one in lifts), 3) for name in lifts[0].phases_ms},
        rounds=len(totals),
        native_range_ms=(round(min(natives), 3), round(max(natives), 3)),
        lift_range_ms=(round(min(totals), 3), round(max(totals), 3)),
    )  # fmt: skip


def _block(source: TransformersExecutor, ids: Sequence[int]) -> KVBlock:
    [row], _ = source.prefill([ids])
    return source.block(row, ids)


def _cast(maps: CrossModelMap, dtype: torch.dtype) -> CrossModelMap:
    return CrossModelMap(
        tuple({side: replace(one, weight=one.weight.to(dtype)) for side, one in sides.items()} for sides in maps.layers)
    )


class _WaitingPhases(Phases):
    """Phases of a GPU: each waits for the kernels before it and for its own."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        torch.cuda.synchronize()
        with super().__call__(name):
            yield
            torch.cuda.synchronize()
