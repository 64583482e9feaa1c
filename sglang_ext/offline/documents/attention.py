"""How the query attends to documents, against a full prefill: equations 4 and 11."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from sglang_ext.attention import attention_weights
from sglang_ext.documents.link import Placed
from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.cache import LinkedCache
from sglang_ext.offline.documents.libraries import PLAIN, Arm, Library
from sglang_ext.offline.documents.rows import AttentionRow
from sglang_ext.offline.documents.run import Evaluation, Prompt, timed_prefill
from sglang_ext.offline.executor import Probe, Work

PRE_END, INTERIOR_END = 0.1, 0.9  # shares of a document's length
PEAKS = 8


def weights_on_documents(cache: LinkedCache) -> list[torch.Tensor]:
    """Per document, the weights of the query's tokens on its own tokens: float32 [layers, queries, heads, n].

    Of a prefilled cache. Runs the query again, which writes the same KV again.
    """
    linked, row, executor = cache.linked, cache.row, cache.executor
    query, probe = torch.tensor(linked.query), Probe()
    executor.compute([Work(row, linked.tokens[query], query)], probe)
    layers = [
        attention_weights(queries[0], query, row.keys[layer, : len(linked)], probe.scale)
        for layer, queries in enumerate(probe.queries)
    ]
    return [torch.stack([one[..., _own(placed)] for one in layers]).cpu() for placed in linked.placed]


def _own(placed: Placed) -> slice:
    return slice(placed.own.start, placed.own.stop)


@dataclass
class Region:
    """The mean of |A - B| over documents, each document counted once."""

    total: float = 0.0
    documents: int = 0

    def add(self, apart: torch.Tensor) -> None:
        """apart: |A - B| of one document's tokens of the region, [layers, queries, heads, tokens]."""
        if apart.shape[-1]:
            self.total += float(apart.mean())
            self.documents += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.documents if self.documents else None


@dataclass
class Deviation:
    """D_pre and D_int of one method against the full prefill, and how its own attention lies within documents."""

    pre: Region = field(default_factory=Region)
    interior: Region = field(default_factory=Region)
    _mass: torch.Tensor = field(default_factory=lambda: torch.zeros(PEAKS, dtype=torch.float64))
    _seen: torch.Tensor = field(default_factory=lambda: torch.zeros(PEAKS, dtype=torch.float64))
    _inner: list[float] = field(default_factory=lambda: [0.0, 0.0])  # mass, width

    def add(self, own: torch.Tensor, full: torch.Tensor) -> None:
        """One document's weights under the method and under the full prefill: [layers, queries, heads, n]."""
        apart, place = (own - full).abs(), torch.arange(own.shape[-1]) / own.shape[-1]
        interior = (place >= PRE_END) & (place < INTERIOR_END)
        self.pre.add(apart[..., place < PRE_END])
        self.interior.add(apart[..., interior])
        density = own.double().mean((0, 1, 2))  # [n]
        first = density[:PEAKS]
        self._mass[: len(first)] += first
        self._seen[: len(first)] += 1
        self._inner[0] += float(density[interior].sum())
        self._inner[1] += int(interior.sum())

    @property
    def peaks(self) -> list[float]:
        """T_j for j = 1, 2, ...: the density at the j-th token over the interior's, which widths weigh."""
        mass, width = self._inner
        if not mass:
            return []
        known = self._seen > 0
        return (self._mass[known] / self._seen[known] / (mass / width)).tolist()


def measure(
    evaluation: Evaluation, prompts: Sequence[Prompt], task: str, tick: Callable[[], None]
) -> list[AttentionRow]:
    """A row for no recompute and for each library that is compiled to be read as it is. Calls `tick` per prompt.

    Documents that are no slice of a prompt are left out of both sides.
    """
    read = [library for library in evaluation.libraries if library.maps is None]
    plain = next(library for library in read if library.method == PLAIN)
    found = {library.name: Deviation() for library in read}
    for prompt in prompts:
        full = _weights(evaluation, prompt, plain, Arm(FULL))
        for library in read:
            own = _weights(evaluation, prompt, library, Arm(NO_RECOMPUTE))
            for one, other in zip(own, full, strict=True):
                found[library.name].add(one, other)
        tick()
    base = found[plain.name]
    return [
        AttentionRow(
            task=task, model=evaluation.reader.name, method=library.label(Arm(NO_RECOMPUTE)),
            documents=library.name, n=len(prompts), r_pre=_ratio(found[library.name].pre, base.pre),
            r_int=_ratio(found[library.name].interior, base.interior),
            peaks=[round(one, 4) for one in found[library.name].peaks],
        )
        for library in read
    ]  # fmt: skip


def _weights(evaluation: Evaluation, prompt: Prompt, library: Library, arm: Arm) -> list[torch.Tensor]:
    spans, _ = prompt.spans(evaluation.compiled(library, [prompt]))
    cache, _, _ = timed_prefill(evaluation.reader.executor, spans, arm, library)
    return weights_on_documents(cache)


def _ratio(own: Region, base: Region) -> float | None:
    """R_r (equation 4)."""
    return round(own.mean / base.mean, 4) if own.mean is not None and base.mean else None
