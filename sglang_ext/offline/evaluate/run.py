"""Runs arms over a dataset in batches: each prompt is prefilled once per model and mapped once per pack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.offline.batches import batches
from sglang_ext.offline.corpus import encode
from sglang_ext.offline.evaluate.arms import Arm
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.measures import Batch, Measure
from sglang_ext.offline.evaluate.oracles import LAYER_PREFIX, Case, mapping_error
from sglang_ext.offline.evaluate.store import Agreement, Outcome, Store, packed
from sglang_ext.offline.evaluate.template import Template, templates
from sglang_ext.offline.executor import Row, TransformersExecutor
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import Fraction, needs_attention, top_positions

MAX_BATCH = 64  # rows of one decode step; more did not pay on two CPU cores


@dataclass(frozen=True)
class Model:
    """A model by the name that the table gives it."""

    name: str
    executor: TransformersExecutor


@dataclass(frozen=True)
class Pair:
    """A pack, the source that it maps from, and the arms to run with it."""

    source: Model
    pack: Pack
    arms: tuple[Arm, ...]
    agreement_rho: float | None = None  # where given, each layer's own choice is compared with the shared one

    def check(self, target: Model) -> None:
        """Raises PackError for a pack that was made for other models."""
        self.pack.check_target(target.executor.identity, target.executor.geometry)
        self.pack.check_source(self.source.executor.identity, self.source.executor.geometry)


@dataclass(frozen=True)
class Results:
    """Outcomes in the dataset's order: of the target, of each source by name, of each pair's arms."""

    dataset: Dataset
    prompts: list[list[int]]
    templates: dict[str, Template]
    target: list[Outcome]
    sources: dict[str, list[Outcome]]
    lifted: list[dict[Arm, list[Outcome]]]
    agreement: list[list[Agreement]]


class Evaluation:
    """One target, its pairs and one measure. Raises PackError for a pack made for other models."""

    def __init__(
        self,
        target: Model,
        pairs: Sequence[Pair],
        tokenizer: Any,
        measure: Measure,
        store: Store,
        batch: int = MAX_BATCH,
    ) -> None:
        for pair in pairs:
            pair.check(target)
        self.target, self.pairs, self.tokenizer = target, pairs, tokenizer
        self._measure, self._store, self._batch = measure, store, batch
        self._sources = {pair.source.name: pair.source for pair in pairs}
        self._jobs = self._list_jobs()

    def run(self, dataset: Dataset, tick: Callable[[int, int], None]) -> Results:
        """Runs what is not in the store yet. Calls tick(done, all), in outcomes, as they come.

        What is done when this is interrupted stays in the store. Raises EvaluationError for a prompt of one token.
        """
        prompts = [self._encode(item) for item in dataset.items]
        whole = Batch(dataset.items, prompts, [self._measure.limit(item) for item in dataset.items])
        kept = {name: self._store.read(key, kind) for name, (key, kind) in self._jobs.items()}
        total = len(self._jobs) * len(prompts)
        done = sum(digest in one for one in kept.values() for digest in whole.digests)
        tick(done, total)
        for batch in self._batches(whole):
            missing = {name for name, one in kept.items() if any(digest not in one for digest in batch.digests)}
            if not missing:
                continue
            for name, outcomes in self._run(batch, missing):
                new = [one for one in outcomes if one.item not in kept[name]]
                self._store.append(self._jobs[name][0], new)
                kept[name].update({one.item: one for one in new})
                done += len(new)
                tick(done, total)

        def of(*name: Any) -> list:
            return [kept[name][digest] for digest in whole.digests]

        return Results(
            dataset, prompts,
            templates(((item.task, ids) for item, ids in zip(dataset.items, prompts)), self.tokenizer.all_special_ids),
            of("target"), {name: of("source", name) for name in self._sources},
            [{arm: of("lifted", at, arm) for arm in pair.arms} for at, pair in enumerate(self.pairs)],
            [of("layers", at) if pair.agreement_rho is not None else [] for at, pair in enumerate(self.pairs)],
        )  # fmt: skip

    @property
    def unfinished(self) -> int:
        """Lines of an earlier run that were not written whole, and are measured again."""
        return self._store.unfinished

    def cases(self, pair: Pair, prompts: Sequence[list[int]], natives: Sequence[Row], attention: bool) -> list[Case]:
        """Each prompt mapped through a pair's pack."""
        rows, _ = pair.source.executor.prefill(prompts)
        return [self._case(pair, *one, attention) for one in zip(prompts, natives, rows)]

    def _encode(self, item: Item) -> list[int]:
        ids = encode(self.tokenizer, item.record)
        if len(ids) < 2:
            raise EvaluationError(f"item {item.id!r} has {len(ids)} tokens; a lift needs at least two")
        return ids

    def _list_jobs(self) -> dict[tuple, tuple[dict[str, Any], type]]:
        """Name of each arm -> all that its outcomes depend on besides the item, and their kind."""
        common = {"measure": self._measure.name, "target": self.target.executor.identity.to_json()}
        common["dtype"] = str(self.target.executor.model.dtype)
        jobs: dict[tuple, tuple[dict[str, Any], type]] = {("target",): (common, Outcome)}
        for name, model in self._sources.items():
            jobs["source", name] = ({**common, "source": model.executor.identity.to_json()}, Outcome)
        for at, pair in enumerate(self.pairs):
            for arm in pair.arms:
                budget = {"rho": arm.rho, "coverage": arm.coverage}
                key = {**common, "pack": pair.pack.digest, "selector": arm.selector, **budget}
                jobs["lifted", at, arm] = (key, Outcome)
            if pair.agreement_rho is not None:
                jobs["layers", at] = ({**common, "pack": pair.pack.digest, "layers": pair.agreement_rho}, Agreement)
        return jobs

    def _batches(self, whole: Batch) -> Iterator[Batch]:
        for part in batches([len(ids) for ids in whole.prompts], self._batch):
            yield Batch(whole.items[part], whole.prompts[part], whole.limits[part])

    def _run(self, batch: Batch, missing: set[tuple]) -> Iterator[tuple[tuple, list]]:
        """The outcomes of the missing arms for one batch, one arm after the other."""
        target, measure, spare = self.target.executor, self._measure, max(batch.limits)
        natives, logits = target.prefill(batch.prompts, spare)
        reference = measure.reference(target, batch, natives, logits)
        if ("target",) in missing:
            yield ("target",), measure.outcomes(target, batch, natives, logits, reference)
        for name, model in self._sources.items():
            if ("source", name) in missing:
                rows, logits = model.executor.prefill(batch.prompts, spare)
                yield ("source", name), measure.outcomes(model.executor, batch, rows, logits, reference)
        for at, pair in enumerate(self.pairs):
            wanted = [arm for arm in pair.arms if ("lifted", at, arm) in missing]
            if not wanted and ("layers", at) not in missing:
                continue
            cases = self.cases(pair, batch.prompts, natives, any(needs_attention(arm.kind) for arm in wanted))
            if ("layers", at) in missing:
                budget = Fraction(pair.agreement_rho)
                yield ("layers", at), [_agreement(digest, case, budget) for digest, case in zip(batch.digests, cases)]
            for arm in wanted:
                yield ("lifted", at, arm), self._lift(batch, cases, arm, reference, spare)

    def _case(self, pair: Pair, ids: list[int], native: Row, row: Row, attention: bool) -> Case:
        source, target = pair.source.executor, self.target.executor
        received = source.attention_received(row, ids) if attention else None
        block = source.block(row, ids, received).span(0, len(ids) - 1)
        filled = target.row(len(ids))
        disagreement = target.fill_mapped(filled, block, pair.pack.maps)
        return Case(target, ids, native, filled, block, disagreement)

    def _lift(self, batch: Batch, cases: Sequence[Case], arm: Arm, reference: Any, spare: int) -> list[Outcome]:
        target = self.target.executor
        if arm.kind == LAYER_PREFIX:
            rows, plans = zip(*(case.lifted_by_layers(arm.rho, spare) for case in cases))
        else:
            rows, plans = zip(*(case.lifted(arm.selector, arm.budget, spare) for case in cases))
        logits = target.run(rows, batch.prompts, plans)
        outcomes = self._measure.outcomes(target, batch, rows, logits, reference)
        by_position = arm.kind != LAYER_PREFIX
        return [
            one.model_copy(
                update={
                    "length": plan.length,
                    "recomputed": packed(plan.compute[:-1], plan.length) if by_position else "",
                }
            )
            for one, plan in zip(outcomes, plans)
        ]


def _agreement(digest: str, case: Case, budget: Fraction) -> Agreement:
    """How much of the shared set each layer would have chosen by itself, for both scores (figure 12)."""
    errors = mapping_error(case)
    return Agreement(
        item=digest,
        rank_disagreement=_overlaps(case.disagreement, case.disagreement.sum(0), budget),
        mapping_error=_overlaps(errors, errors.mean(0), budget),
    )


def _overlaps(layers: torch.Tensor, shared: torch.Tensor, budget: Fraction) -> tuple[float, ...]:
    common = set(top_positions(shared, budget).tolist())
    own = [set(top_positions(layer, budget).tolist()) for layer in layers]
    return tuple(round(len(one & common) / len(common), 5) if common else 1.0 for one in own)
