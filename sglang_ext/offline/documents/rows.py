"""What an evaluation of documents writes: one row per task, method and budget."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from pydantic import BaseModel, ConfigDict

from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.libraries import PLAIN, budgeted
from sglang_ext.offline.documents.outcomes import LinkedOutcome
from sglang_ext.offline.documents.run import Evaluation, Results
from sglang_ext.offline.documents.timing import TimingRow
from sglang_ext.offline.evaluate.datasets.items import Item
from sglang_ext.offline.evaluate.datasets.scoring import micro_f1, same_words
from sglang_ext.offline.evaluate.significance import paired_p


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Row(_Strict):
    """One method and budget on one task.

    documents: who made them: plain, a Writer's domain, or a pack; budget: tokens of each document for epic, else a share
    of the documents' tokens; exact_match, micro_f1: in [0, 1], the latter pooled over all items (appendix D); kl: to the
    full prefill, nats per token of its own answer, and agreement: of the most likely tokens; recovery: equation 5, by
    micro-F1, and recovery_exact: by exact match, None where full and no recompute are equal; p_vs_full: paired and
    two-sided, of exact match; computed: mean share of the prompt's positions that ran online; missed: documents that are
    no slice of their prompt; ttft_ms: median; flops: mean; seeds: exact match of each seed, all figures being their mean.
    """

    task: str
    model: str
    method: str
    documents: str
    budget: float | None
    n: int
    exact_match: float
    micro_f1: float
    kl: float
    agreement: float
    recovery: float | None
    recovery_exact: float | None
    p_vs_full: float | None
    computed: float
    missed: int
    ttft_ms: float
    flops: int
    seeds: list[float] | None = None


class AttentionRow(_Strict):
    """One method's attention against the full prefill's, over the documents of one task.

    r_pre, r_int: equation 4, at the first tenth of each document and between a tenth and nine tenths; peaks: T_1, T_2, ...
    of equation 11, as many as documents have tokens, at most 8; None where no document has a token in the region.
    """

    task: str
    model: str
    method: str
    documents: str
    n: int
    r_pre: float | None
    r_int: float | None
    peaks: list[float]


class Report(_Strict):
    """`documents.json`."""

    rows: list[Row]
    attention: list[AttentionRow]
    timing: list[TimingRow]
    dropped: dict[str, int]


def rows(evaluation: Evaluation, results: Results) -> list[Row]:
    """One per task, method and budget, in the libraries' order; seeds of one method are one row."""
    tasks = dict.fromkeys(prompt.item.task for prompt in results.prompts)
    return [row for task in tasks for row in _Table(evaluation, results, task).rows()]


class _Table:
    """The outcomes of one task's items."""

    def __init__(self, evaluation: Evaluation, results: Results, task: str) -> None:
        self._model, self._task = evaluation.reader.name, task
        chosen = [at for at, prompt in enumerate(results.prompts) if prompt.item.task == task]
        self._items = [results.prompts[at].item for at in chosen]
        self._runs: dict[tuple[str, str, float | None], list[list[LinkedOutcome]]] = {}
        for library, arms in zip(evaluation.libraries, results.arms):
            for arm, outcomes in arms.items():
                key = (library.label(arm), library.domain, budgeted(arm.kind, arm.budget))
                self._runs.setdefault(key, []).append([outcomes[at] for at in chosen])

    def rows(self) -> list[Row]:
        return [self._row(*key, runs) for key, runs in self._runs.items()]

    def _row(self, method: str, documents: str, budget: float | None, runs: Sequence[list[LinkedOutcome]]) -> Row:
        every = [one for run in runs for one in run]
        exact = [fmean(scores) for scores in zip(*(self._exact(run) for run in runs))]
        full = self._runs.get((FULL, PLAIN, None))
        tokens = sum(one.tokens for one in every)
        return Row(
            task=self._task, model=self._model, method=method, documents=documents, budget=budget, n=len(exact),
            exact_match=_rounded(fmean(exact)), micro_f1=_rounded(self._micro_f1(runs)),
            kl=round(sum(one.kl for one in every) / tokens, 6),
            agreement=_rounded(sum(one.agree for one in every) / tokens),
            recovery=self._recovery(self._micro_f1, runs), recovery_exact=self._recovery(self._mean_exact, runs),
            p_vs_full=None if full is None or method == FULL else paired_p(exact, self._exact(full[0])),
            computed=_rounded(fmean(one.computed / one.length for one in every)),
            missed=sum(one.missed for one in runs[0]), ttft_ms=round(median(one.ttft_ms for one in every), 2),
            flops=round(fmean(one.flops for one in every)),
            seeds=[_rounded(fmean(self._exact(run))) for run in runs] if len(runs) > 1 else None,
        )  # fmt: skip

    def _recovery(self, measure, runs: Sequence[list[LinkedOutcome]]) -> float | None:
        """(m - no recompute) / (full - no recompute)."""
        known = [self._runs.get((name, PLAIN, None)) for name in (FULL, NO_RECOMPUTE)]
        if None in known:
            return None
        top, bottom = (measure(one) for one in known)
        return None if top == bottom else _rounded((measure(runs) - bottom) / (top - bottom))

    def _exact(self, run: Sequence[LinkedOutcome]) -> list[float]:
        return [_exact(item, one.text) for item, one in zip(self._items, run)]

    def _mean_exact(self, runs: Sequence[list[LinkedOutcome]]) -> float:
        return fmean(score for run in runs for score in self._exact(run))

    def _micro_f1(self, runs: Sequence[list[LinkedOutcome]]) -> float:
        return fmean(micro_f1((one.text, item.gold) for item, one in zip(self._items, run)) for run in runs)


def _exact(item: Item, text: str) -> float:
    """The item's own rule where it says right or wrong, else the same words as a gold answer."""
    return item.score(text) if item.kind == "accuracy" else same_words(text, item.gold)


def _rounded(value: float) -> float:
    return round(value, 5)
