"""From a plan to its results: loads the models once, runs both directions, writes table, JSON and plots."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from sglang_ext.hub import local_folder
from sglang_ext.offline import acceptance
from sglang_ext.offline.bars import Bars
from sglang_ext.offline.corpus import encode
from sglang_ext.offline.evaluate import plots, report
from sglang_ext.offline.evaluate.datasets import load
from sglang_ext.offline.evaluate.datasets.items import Dataset
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.measures import Answers, Fidelity, MeasureName
from sglang_ext.offline.evaluate.plans import Direction, Plan
from sglang_ext.offline.evaluate.rows import Document, document
from sglang_ext.offline.evaluate.run import Evaluation, Model, Pair, Results
from sglang_ext.offline.evaluate.store import Store
from sglang_ext.offline.evaluate.strip import Strip, strip
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.report import show
from sglang_ext.transfer.pack import Acceptance, Pack, rewrite_acceptance

PLOTS = "evaluate"  # the folder of plots and kept outcomes, beside evaluate.json


class Session:
    """One run of the command.

    out: the folder of `evaluate.json`; device, dtype: where and in what the models run; batch: prompts of one forward.
    """

    def __init__(self, out: Path, measure: MeasureName, device: str, dtype: torch.dtype, batch: int) -> None:
        self._out, self._measure, self._device, self._dtype, self._batch = out, measure, device, dtype, batch
        self._models: dict[Path, Model] = {}
        self._console = Console()
        self._store = Store(out / PLOTS / "outcomes")

    def run(self, plan: Plan, limit: int | None) -> Document:
        """Runs a plan and shows it; `evaluate.json` and the plots go to the folder beside it.

        Raises EvaluationError where the plan's parts do not fit together.
        """
        dataset = load(plan.dataset, limit)
        if self._measure == "answers" and any(item.kind == "none" for item in dataset.items):
            raise EvaluationError(f"dataset {plan.dataset!r} has no answers; measure its fidelity (--measure fidelity)")
        for reason, count in dataset.dropped.items():
            self._console.print(f"{plan.dataset}: {count} x {reason}")
        found, one = self._direction(plan.forward, dataset, plan.shown_rho)
        if plan.reverse is not None:
            found = found.model_copy(update={"reverse": self._direction(plan.reverse, dataset, None)[0]})
        (self._out / "evaluate.json").write_text(found.model_dump_json(indent=2) + "\n")
        report.show(found, self._console)
        for path in plots.draw(found, one, plan.shown_rho, self._out / PLOTS):
            self._console.print(f"plot written to {path}")
        self._console.print(f"table written to {self._out / 'evaluate.json'}")
        return found

    def accept(self, plan: Plan, limit: int | None, rho: float, prompts: int) -> None:
        """Measures each pack's acceptance record on the first `prompts` prompts and writes it into the pack.

        The prompts must not be those that the pack was calibrated on. Raises PackError for a bench-only pack.
        """
        dataset = load(plan.dataset, limit)
        for direction in (plan.forward, *([plan.reverse] if plan.reverse else [])):
            target = self._model(direction.target)
            tokenizer = AutoTokenizer.from_pretrained(str(local_folder(direction.target)))
            ids = [encode(tokenizer, item.record) for item in dataset.items[:prompts]]
            for folder, source, _ in direction.pairs:
                pair = Pair(self._model(source), Pack.load(folder, self._device), ())
                pair.check(target)
                show(rewrite_acceptance(folder, self._record(pair, target, ids, rho)), self._console)
                self._console.print(f"acceptance record written into {folder}")

    def _record(self, pair: Pair, target: Model, prompts: list[list[int]], rho: float) -> Acceptance:
        with Bars() as bars:
            return acceptance.measure(
                pair.source.executor, target.executor, prompts, pair.pack.maps, acceptance.Repair(rho=rho),
                bars.counted(f"accepting {pair.pack.manifest.name}", len(prompts)),
            )  # fmt: skip

    def _direction(self, direction: Direction, dataset: Dataset, rho: float | None) -> tuple[Document, Strip | None]:
        """The document of a direction; with a rho also layer agreement and the strip of its first pair."""
        target = self._model(direction.target)
        tokenizer = AutoTokenizer.from_pretrained(str(local_folder(direction.target)))
        pairs = [
            Pair(self._model(source), Pack.load(folder, self._device), arms, rho if at == 0 else None)
            for at, (folder, source, arms) in enumerate(direction.pairs)
        ]
        measure = Answers(tokenizer) if self._measure == "answers" else Fidelity()
        evaluation = Evaluation(target, pairs, tokenizer, measure, self._store, self._batch)
        results = self._run(evaluation, dataset)
        shown = None if rho is None else self._strip(evaluation, results, tokenizer, rho)
        return document(evaluation, results), shown

    def _run(self, evaluation: Evaluation, dataset: Dataset) -> Results:
        with Bars() as bars:
            results = evaluation.run(dataset, partial(bars.show, f"to {evaluation.target.name}"))
        if evaluation.unfinished:
            self._console.print(f"{evaluation.unfinished} unfinished lines of an earlier run were dropped")
        return results

    def _strip(self, evaluation: Evaluation, results: Results, tokenizer: Any, rho: float) -> Strip | None:
        """Of the first prompt whose task has a template."""
        for item, ids in zip(results.dataset.items, results.prompts):
            if item.task in results.templates:
                return strip(evaluation, evaluation.pairs[0], ids, results.templates[item.task], tokenizer, rho)
        return None

    def _model(self, name: str) -> Model:
        folder = local_folder(name)
        if folder not in self._models:
            self._models[folder] = Model(
                folder.name, TransformersExecutor.from_folder(folder, self._device, self._dtype)
            )
        return self._models[folder]
