"""The table: what the JSON file holds, made from outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from sglang_ext.offline.evaluate.arms import Arm
from sglang_ext.offline.evaluate.run import Evaluation, Pair, Results
from sglang_ext.offline.evaluate.significance import paired_p
from sglang_ext.offline.evaluate.store import Outcome, unpacked
from sglang_ext.transfer.selectors import RANDOM


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TaskRow(_Strict):
    """One task's share of a row."""

    n: int
    accuracy: float


class Alone(_Strict):
    """A model that prefills for itself. kl: nats per token, where fidelity is measured."""

    name: str
    model: str
    n: int
    accuracy: float
    kl: float | None = None
    tasks: dict[str, TaskRow]


class Row(_Strict):
    """One selector and budget of one pair.

    rho: the budget, or the mean share that was computed where a coverage chose it; accuracy: the mean score, in
    [0, 1]: right answers, F1, or the agreement of tokens where fidelity is measured; retention: accuracy over the
    target's; p_vs_target, p_vs_random: paired and two-sided (significance.py), the latter against random at the
    same rho; gap_closed: the share of the way from rho = 0 to the target; template_share: of the positions chosen
    to be recomputed, those in the template (template.py); seeds: accuracy of each seed, of which accuracy is the mean.
    """

    source: str
    pack: str
    selector: str
    rho: float
    coverage: float | None = None
    n: int
    accuracy: float
    retention: float | None
    p_vs_target: float | None
    p_vs_random: float | None = None
    gap_closed: float | None = None
    template_share: float | None = None
    kl: float | None = None
    seeds: list[float] | None = None
    tasks: dict[str, TaskRow]


class LayerRow(_Strict):
    """Figure 12: the overlap of each target layer's own top set with the shared one, averaged over prompts."""

    pack: str
    rho: float
    rank_disagreement: list[float]
    mapping_error: list[float]


class Document(_Strict):
    """`evaluate.json`.

    metric: `accuracy`, `f1`, `accuracy and f1`, or `agreement` of tokens; dropped: items left out, by reason; reverse:
    the other direction, where the plan has one.
    """

    dataset: str
    metric: str
    dropped: dict[str, int]
    target: Alone
    sources: dict[str, Alone]
    rows: list[Row]
    layers: list[LayerRow]
    reverse: Document | None = None


def document(evaluation: Evaluation, results: Results) -> Document:
    """The document of a run. `sources` and rows are named by source; a pair's rows also by its pack."""
    table = _Table(results)
    sources = {
        pair.source.name: table.alone(
            pair.source.name, pair.source.executor.identity.model, results.sources[pair.source.name]
        )
        for pair in evaluation.pairs
    }
    return Document(
        dataset=results.dataset.name, metric=table.metric, dropped=results.dataset.dropped,
        target=table.alone(evaluation.target.name, evaluation.target.executor.identity.model, results.target),
        sources=sources,
        rows=[row for pair, lifted in zip(evaluation.pairs, results.lifted) for row in table.rows(pair, lifted)],
        layers=[
            LayerRow(
                pack=pair.pack.manifest.name, rho=pair.agreement_rho,
                **{
                    score: [round(fmean(layer), 4) for layer in zip(*(getattr(one, score) for one in found))]
                    for score in ("rank_disagreement", "mapping_error")
                },
            )
            for pair, found in zip(evaluation.pairs, results.agreement) if pair.agreement_rho is not None
        ],
    )  # fmt: skip


class _Table:
    """Scores of outcomes, in the order of the items."""

    def __init__(self, results: Results) -> None:
        self._results = results
        self._items = results.dataset.items
        self._forced = any(one.tokens for one in results.target)
        self._target = self._scores(results.target)
        kinds = sorted({item.kind for item in self._items})
        self.metric = "agreement" if self._forced else " and ".join(kinds)

    def alone(self, name: str, model: str, outcomes: Sequence[Outcome]) -> Alone:
        scores = self._scores(outcomes)
        return Alone(
            name=name, model=model, n=len(scores), accuracy=_rounded(fmean(scores)), kl=self._kl(outcomes),
            tasks=self._tasks(scores),
        )  # fmt: skip

    def rows(self, pair: Pair, lifted: dict[Arm, list[Outcome]]) -> list[Row]:
        """One per selector and budget; the seeds of random are one row."""
        groups: dict[tuple, list[list[Outcome]]] = {}
        for arm, outcomes in lifted.items():
            groups.setdefault((arm.kind, arm.rho, arm.coverage), []).append(outcomes)
        scores = {key: [fmean(of_item) for of_item in zip(*map(self._scores, runs))] for key, runs in groups.items()}
        rows = []
        for key, runs in groups.items():
            selector, rho, coverage = key
            own, target = scores[key], fmean(self._target)
            plain = fmean(next(one for (_, at, share), one in scores.items() if at == 0 and share is None))
            random = None if coverage is not None or selector == RANDOM else scores.get((RANDOM, rho, None))
            rows.append(Row(
                source=pair.source.name, pack=pair.pack.manifest.name, selector=selector, coverage=coverage,
                rho=rho if coverage is None else _rounded(fmean(_computed(one) for run in runs for one in run)),
                n=len(own), accuracy=_rounded(fmean(own)),
                retention=_rounded(fmean(own) / target) if target else None,
                # Against itself the target's agreement is 1 by definition: there is nothing to test.
                p_vs_target=None if self._forced else paired_p(own, self._target),
                p_vs_random=None if random is None else paired_p(own, random),
                gap_closed=_rounded((fmean(own) - plain) / (target - plain)) if target != plain else None,
                template_share=self._template_share(runs), kl=self._kl([one for run in runs for one in run]),
                seeds=[_rounded(fmean(self._scores(run))) for run in runs] if len(runs) > 1 else None,
                tasks=self._tasks(own),
            ))  # fmt: skip
        return rows

    def _scores(self, outcomes: Sequence[Outcome]) -> list[float]:
        if self._forced:
            return [one.agree / one.tokens for one in outcomes]
        return [item.score(one.text) for item, one in zip(self._items, outcomes)]

    def _kl(self, outcomes: Sequence[Outcome]) -> float | None:
        if not self._forced:
            return None
        return round(sum(one.kl for one in outcomes) / sum(one.tokens for one in outcomes), 6)

    def _tasks(self, scores: Sequence[float]) -> dict[str, TaskRow]:
        by_task: dict[str, list[float]] = {}
        for item, score in zip(self._items, scores):
            by_task.setdefault(item.task, []).append(score)
        return {task: TaskRow(n=len(own), accuracy=_rounded(fmean(own))) for task, own in by_task.items()}

    def _template_share(self, runs: Sequence[Sequence[Outcome]]) -> float | None:
        chosen = template = 0
        for run in runs:
            for item, ids, one in zip(self._items, self._results.prompts, run):
                known = self._results.templates.get(item.task)
                if known is None or not one.recomputed:
                    continue
                mask = unpacked(one.recomputed, one.length)
                chosen += int(mask.sum())
                template += int((mask & known.mask(ids)).sum())
        return _rounded(template / chosen) if chosen else None


def _computed(one: Outcome) -> float:
    """The share of the prompt that was computed, its last position included."""
    return (int(one.recomputed, 16).bit_count() + 1) / one.length


def _rounded(value: float) -> float:
    return round(value, 5)
