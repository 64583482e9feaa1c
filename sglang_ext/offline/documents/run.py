"""Runs arms over prompts with documents: each prompt is prefilled by itself, against the clock, and decoded in batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.documents.document import Document
from sglang_ext.documents.link import Span, link, locate
from sglang_ext.documents.planners import NO_RECOMPUTE, planner_named
from sglang_ext.offline import acceptance
from sglang_ext.offline.batches import batches
from sglang_ext.offline.corpus import encode
from sglang_ext.offline.documents.cache import LinkedCache
from sglang_ext.offline.documents.flops import OnlineFlops
from sglang_ext.offline.documents.libraries import NO_CACHE, Arm, Library
from sglang_ext.offline.documents.outcomes import LinkedOutcome
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.measures import stop_tokens
from sglang_ext.offline.evaluate.run import Model
from sglang_ext.offline.evaluate.store import Store, item_digest
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.plan import FillKind

BATCH = 50
_BETWEEN = -1  # in a digest, no token


@dataclass(frozen=True)
class Prompt:
    """An item as the reading model sees it: its ids, and those of each document by itself."""

    item: Item
    ids: list[int]
    documents: tuple[tuple[int, ...], ...]

    @property
    def digest(self) -> str:
        parts = [token for ids in self.documents for token in (_BETWEEN, *ids)]
        return item_digest([*self.ids, *parts], self.item.max_new_tokens)

    def spans(self, compiled: dict[tuple[int, ...], Document]) -> tuple[tuple[Span, ...], int]:
        """Its spans with compiled documents in their places, and how many are no slice of the prompt."""
        located = locate(self.ids, [compiled[ids] for ids in self.documents])
        return located.spans, len(located.missed)


@dataclass(frozen=True)
class Results:
    """Outcomes in the dataset's order, of each library's arms."""

    dataset: Dataset
    prompts: list[Prompt]
    arms: list[dict[Arm, list[LinkedOutcome]]]


class Evaluation:
    """One reading model and its libraries. What is done when a run is interrupted stays in the store."""

    def __init__(self, reader: Model, libraries: Sequence[Library], tokenizer: Any, store: Store) -> None:
        self.reader, self.libraries, self.tokenizer = reader, libraries, tokenizer
        self._store = store
        self._stop = stop_tokens(reader.executor, tokenizer)
        common = {"measure": "documents", "reader": reader.executor.identity.to_json()}
        common["dtype"] = str(reader.executor.model.dtype)
        self._jobs = {
            (at, arm): {**common, **library.key, "planner": arm.planner, "budget": arm.budget}
            for at, library in enumerate(libraries) for arm in library.arms
        }  # fmt: skip

    def run(self, dataset: Dataset, tick: Callable[[int, int], None]) -> Results:
        """Runs what is not in the store yet. Calls tick(done, all), in outcomes, as they come.

        Raises EvaluationError for an item without documents.
        """
        prompts = [self._prompt(item) for item in dataset.items]
        digests = [prompt.digest for prompt in prompts]
        kept = {job: self._store.read(key, LinkedOutcome) for job, key in self._jobs.items()}
        total, done = len(self._jobs) * len(prompts), sum(digest in one for one in kept.values() for digest in digests)
        tick(done, total)
        for part in batches([len(prompt.ids) for prompt in prompts], BATCH):
            batch = prompts[part]
            missing = [job for job, one in kept.items() if any(prompt.digest not in one for prompt in batch)]
            for job, outcomes in self._run(batch, missing):
                new = [one for one in outcomes if one.item not in kept[job]]
                self._store.append(self._jobs[job], new)
                kept[job].update({one.item: one for one in new})
                done += len(new)
                tick(done, total)
        found = [
            {arm: [kept[at, arm][digest] for digest in digests] for arm in library.arms}
            for at, library in enumerate(self.libraries)
        ]
        return Results(dataset, prompts, found)

    def compiled(self, library: Library, prompts: Sequence[Prompt]) -> dict[tuple[int, ...], Document]:
        """The prompts' documents, each compiled once."""
        texts = list(dict.fromkeys(ids for prompt in prompts for ids in prompt.documents))
        parts = batches([len(ids) for ids in texts], len(texts))
        compiled = [document for part in parts for document in library.compiler.compile(texts[part])]
        return dict(zip(texts, compiled, strict=True))

    def _prompt(self, item: Item) -> Prompt:
        if not item.documents:
            raise EvaluationError(f"item {item.id!r} has no documents; choose a dataset that names them")
        ids = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in item.documents]
        return Prompt(item, encode(self.tokenizer, item.record), tuple(ids))

    def _run(
        self, batch: Sequence[Prompt], missing: Sequence[tuple[int, Arm]]
    ) -> Iterator[tuple[tuple[int, Arm], list[LinkedOutcome]]]:
        """The outcomes of the missing jobs for one batch, one job after the other."""
        if not missing:
            return
        references = self._references(batch)
        for at, library in enumerate(self.libraries):
            arms = [arm for index, arm in missing if index == at]
            if not arms:
                continue
            compiled = self.compiled(library, batch)
            flops = OnlineFlops.of(self.reader.executor, library.maps)
            for arm in arms:
                yield (at, arm), self._arm(batch, library, arm, compiled, flops, references)

    def _references(self, batch: Sequence[Prompt]) -> list[tuple[list[int], acceptance.Forced]]:
        """Per prompt the full prefill's greedy answer, its stop token included, and its own distributions over it."""
        executor = self.reader.executor
        limit = max(prompt.item.max_new_tokens for prompt in batch)
        rows, logits = executor.prefill([prompt.ids for prompt in batch], limit)
        answers = [self._until_stop(answer) for answer in executor.greedy(rows, logits, limit, stop=[])]
        return [
            (answer, acceptance.force(executor, row, prompt.ids, answer))
            for prompt, row, answer in zip(batch, rows, answers)
        ]

    def _until_stop(self, answer: list[int]) -> list[int]:
        ends = [at for at, token in enumerate(answer) if token in self._stop]
        return answer[: ends[0] + 1] if ends else answer

    def _arm(
        self,
        batch: Sequence[Prompt],
        library: Library,
        arm: Arm,
        compiled: dict[tuple[int, ...], Document],
        flops: OnlineFlops,
        references: Sequence[tuple[list[int], acceptance.Forced]],
    ) -> list[LinkedOutcome]:
        executor, limit = self.reader.executor, max(prompt.item.max_new_tokens for prompt in batch)
        caches, firsts, times, misses = [], [], [], []
        for prompt in batch:
            spans, missed = prompt.spans(compiled)
            cache, logits, ms = timed_prefill(executor, spans, arm, library, limit)
            caches.append(cache)
            firsts.append(logits)
            times.append(ms)
            misses.append(missed)
        rows = [cache.row for cache in caches]
        answers = executor.greedy(rows, torch.cat(firsts), limit, self._stop)
        found = []
        for prompt, cache, answer, ms, missed, reference in zip(batch, caches, answers, times, misses, references):
            forced = acceptance.force(executor, cache.row, cache.linked.tokens.tolist(), reference[0])
            agree, kl, tokens = acceptance.compare(reference[1], forced, reference[0])
            text = self.tokenizer.decode(answer[: prompt.item.max_new_tokens], skip_special_tokens=True)
            found.append(LinkedOutcome(
                item=prompt.digest, text=text, agree=agree, kl=kl, tokens=tokens, length=len(cache.linked),
                computed=len(cache.linked.plan.compute), missed=missed, ttft_ms=round(ms, 3),
                flops=flops.count(cache.linked, arm.kind),
            ))  # fmt: skip
        return found


def timed_prefill(
    executor: TransformersExecutor, spans: Sequence[Span], arm: Arm, library: Library, spare: int = 0
) -> tuple[LinkedCache, torch.Tensor, float]:
    """A cache-hit prefill: the cache, the last logits [1, V], and the milliseconds to the first token.

    The clock runs from before the layout is made until the first token is known (appendix C); documents are compiled.
    """
    planner = planner_named(NO_RECOMPUTE if arm.kind == NO_CACHE else arm.planner, arm.budget)
    if arm.kind == NO_CACHE:
        spans = [span for span in spans if not isinstance(span, Document)]
    started = time.perf_counter()
    linked = link(spans, FillKind.DOCUMENT if library.maps is None else FillKind.MAPPED)
    cache = LinkedCache(executor, linked, spare, library.maps)
    logits = cache.prefill(planner)
    logits.argmax(-1).tolist()  # waits for the device
    return cache, logits, (time.perf_counter() - started) * 1e3
