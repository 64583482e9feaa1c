"""From studies to their results: loads models, adapters and packs, runs, writes table, JSON and plots."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from sglang_ext.documents.adapter import load_compiler, read_manifest
from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.planners import NO_RECOMPUTE
from sglang_ext.hub import local_folder
from sglang_ext.offline.bars import Bars
from sglang_ext.offline.documents import attention, plots, report
from sglang_ext.offline.documents.libraries import MAPPED, PLAIN, Arm, Library
from sglang_ext.offline.documents.rows import AttentionRow, Report, rows
from sglang_ext.offline.documents.run import Evaluation, Results
from sglang_ext.offline.documents.studies import Plan, Study
from sglang_ext.offline.documents.timing import Clock, TimingRow, measure
from sglang_ext.offline.evaluate.datasets import load
from sglang_ext.offline.evaluate.datasets.items import Dataset
from sglang_ext.offline.evaluate.run import Model
from sglang_ext.offline.evaluate.store import Store
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.load_pair import make_pair
from sglang_ext.transfer.pack import Pack

PLOTS = "documents"  # the folder of plots and kept outcomes, beside documents.json


class Session:
    """One run of the command. out: the folder of `documents.json`; device, dtype: where and in what the models run."""

    def __init__(self, out: Path, device: str, dtype: torch.dtype) -> None:
        self._out, self._device, self._dtype = out, device, dtype
        self._console = Console()
        self._store = Store(out / PLOTS / "outcomes")

    def run(self, plan: Plan, limit: int | None) -> Report:
        """Runs studies one after the other and shows them together. limit: the first so many items of each task."""
        found = Report(rows=[], attention=[], timing=[], dropped={})
        for study in plan.studies:
            self._study(study, limit, found)
        if plan.clock is not None:
            found.timing += self._timing(plan.clock)
        self._out.mkdir(parents=True, exist_ok=True)
        (self._out / "documents.json").write_text(found.model_dump_json(indent=2) + "\n")
        report.show(found, self._console)
        for path in plots.draw(found, self._out / PLOTS):
            self._console.print(f"plot written to {path}")
        self._console.print(f"table written to {self._out / 'documents.json'}")
        return found

    def _study(self, study: Study, limit: int | None, found: Report) -> None:
        reader = self._model(study.model)
        tokenizer = AutoTokenizer.from_pretrained(str(local_folder(study.model)))
        evaluation = Evaluation(reader, self._libraries(study, reader), tokenizer, self._store)
        for name in study.data:
            dataset = load(name, limit)
            for reason, count in dataset.dropped.items():
                found.dropped[f"{name}: {reason}"] = count
            results = self._run(evaluation, dataset)
            found.rows += rows(evaluation, results)
            if study.attention:
                for task in dict.fromkeys(prompt.item.task for prompt in results.prompts):
                    found.attention += self._attention(evaluation, results, task, study.attention)

    def _run(self, evaluation: Evaluation, dataset: Dataset) -> Results:
        with Bars() as bars:
            return evaluation.run(dataset, partial(bars.show, f"{dataset.name} on {evaluation.reader.name}"))

    def _attention(self, evaluation: Evaluation, results: Results, task: str, most: int) -> list[AttentionRow]:
        prompts = [prompt for prompt in results.prompts if prompt.item.task == task][:most]
        with Bars() as bars:
            return attention.measure(evaluation, prompts, task, bars.counted(f"attention, {task}", len(prompts)))

    def _timing(self, clock: Clock) -> list[TimingRow]:
        model = self._model(str(make_pair(clock.shape, seed=0) / "target"))
        with Bars() as bars:
            return list(measure(clock, model, bars.counted(f"time, {clock.shape}", len(clock.lengths) * clock.rounds)))

    def _libraries(self, study: Study, reader: Model) -> list[Library]:
        libraries = [Library(PLAIN, PLAIN, PLAIN, Compiler(reader.executor), study.plain_arms, {"documents": PLAIN})]
        for folder in map(Path, study.adapters):
            manifest, compiler = read_manifest(folder), load_compiler(reader.executor, folder)
            key = {"documents": manifest.digest}
            arms = (Arm(NO_RECOMPUTE),)
            libraries.append(Library(folder.name, manifest.data, compiler.method.value, compiler, arms, key))
        for folder, source in study.packs:
            libraries.append(self._mapped(Pack.load(folder, self._device), self._model(source), reader, study))
        return libraries

    def _mapped(self, pack: Pack, source: Model, reader: Model, study: Study) -> Library:
        """Raises PackError for a pack that was made for other models."""
        pack.check_target(reader.executor.identity, reader.executor.geometry)
        pack.check_source(source.executor.identity, source.executor.geometry)
        name = pack.manifest.name
        key: dict[str, Any] = {"documents": pack.digest}
        return Library(name, name, MAPPED, Compiler(source.executor), study.mapped_arms, key, pack.maps)

    def _model(self, name: str) -> Model:
        folder = local_folder(name)
        return Model(folder.name, TransformersExecutor.from_folder(folder, self._device, self._dtype))
