"""From two models and a corpus to a pack: capture, fit, held-out fit, acceptance."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import islice
from typing import Callable, Iterable, Iterator, Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.offline import acceptance
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.transfer.fit import Fit, HeldOut, MapFitter, held_out
from sglang_ext.transfer.pack import Manifest, ModelRecord, Pack

HELD_OUT_EVERY = 10  # each tenth prompt measures what the others fitted
LEAST_HELD_OUT = 2  # the wrong prompt's arm needs another one
BATCH = 8


@dataclass(frozen=True)
class Settings:
    """How to calibrate; the defaults of the paper's Qwen3 pair where it has one (section 4.1)."""

    name: str
    k: int = 8
    rank: int = 128
    ridge: float = 0.01
    tokens: int = 128_000  # calibration tokens, after the stride
    stride: int = 1
    seed: int = 0
    dtype: str = "float32"
    rho: float = 0.3  # of the acceptance record
    accept_prompts: int = 48
    bench_only: bool = False


class Progress:
    """What a caller may show while calibrating. This one shows nothing."""

    def tokens(self, seen: int, wanted: int) -> None: ...

    def prompts(self, seen: int, wanted: int) -> None: ...


def calibrate(
    source: TransformersExecutor,
    target: TransformersExecutor,
    names: tuple[str, str],
    corpus: str,
    prompts: Iterable[list[int]],
    settings: Settings,
    progress: Progress,
) -> Pack:
    """A fitted, measured pack, not yet saved.

    names: of source and target; corpus: what the manifest says of the prompts; prompts: token ids,
    read once. Memory holds the moments, one batch and the held-out prompts' ids, whatever the corpus.
    Raises CalibrationError where corpus or settings cannot give a map.
    """
    if (source.identity.tokenizer, source.identity.template) != (target.identity.tokenizer, target.identity.template):
        raise CalibrationError(
            f"{names[0]} and {names[1]} have different tokenizers or chat templates: "
            "a cache can only be handed over where both render the same messages to the same ids"
        )
    if settings.accept_prompts < LEAST_HELD_OUT:
        raise CalibrationError(f"accept_prompts is {settings.accept_prompts}; a pack needs at least {LEAST_HELD_OUT}")
    ours, theirs = source.geometry, target.geometry
    fitter = MapFitter(ours.layers, ours.width, theirs.layers, theirs.width, target.model.device)
    kept = _Kept(settings)
    digest = hashlib.sha256()
    offsets = random.Random(settings.seed)
    for batch in _batches(kept.divert(prompts, lambda: fitter.count >= settings.tokens)):
        for ids, (left, right) in zip(batch, _capture(source, target, batch)):
            digest.update(repr(ids).encode())
            rows = range(offsets.randrange(settings.stride), len(ids), settings.stride)
            fitter.add(left, right, torch.tensor(rows, dtype=torch.int64))
        progress.tokens(min(fitter.count, settings.tokens), settings.tokens)
    if fitter.count == 0:
        raise CalibrationError("the corpus holds no prompts")
    fit = fitter.solve(settings.k, settings.rank, settings.ridge, getattr(torch, settings.dtype))
    fit, blocks = _held_out_fit(fit, source, target, kept.prompts)
    record = None
    if not settings.bench_only:
        count = iter(range(1, len(kept.prompts) + 1))
        record = acceptance.measure(
            target, kept.prompts, blocks, fit.maps, settings.rho,
            lambda: progress.prompts(next(count), len(kept.prompts)),
        )  # fmt: skip
    manifest = Manifest(
        name=settings.name,
        source=ModelRecord.of(names[0], source.identity, ours),
        target=ModelRecord.of(names[1], target.identity, theirs),
        dtype=settings.dtype, k=settings.k, rank=settings.rank, ridge=settings.ridge,
        corpus=corpus, corpus_digest=digest.hexdigest(), tokens=fitter.count, stride=settings.stride,
        seed=settings.seed, bench_only=settings.bench_only, layers=fit.records, acceptance=record,
    )  # fmt: skip
    return Pack(manifest, fit.maps)


class _Kept:
    """Every tenth prompt, held out of the fit, up to the number that acceptance wants."""

    def __init__(self, settings: Settings) -> None:
        self.prompts: list[list[int]] = []
        self._wanted = settings.accept_prompts

    def divert(self, prompts: Iterable[list[int]], fitted: Callable[[], bool]) -> Iterator[list[int]]:
        """The prompts to fit, until `fitted` says enough; from then on every prompt is held out."""
        for index, ids in enumerate(prompts):
            enough = fitted()
            if enough and len(self.prompts) >= self._wanted:
                return
            if len(ids) < 2:
                continue
            if enough or index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1:
                if len(self.prompts) < self._wanted:
                    self.prompts.append(ids)
            else:
                yield ids


def _batches(prompts: Iterator[list[int]]) -> Iterator[list[list[int]]]:
    while batch := list(islice(prompts, BATCH)):
        yield batch


def _capture(
    source: TransformersExecutor, target: TransformersExecutor, batch: Sequence[list[int]]
) -> Iterator[tuple[KVBlock, KVBlock]]:
    left, _ = source.prefill(batch)
    right, _ = target.prefill(batch)
    for ids, one, other in zip(batch, left, right):
        yield source.block(one, ids), target.block(other, ids)


def _held_out_fit(
    fit: Fit, source: TransformersExecutor, target: TransformersExecutor, prompts: list[list[int]]
) -> tuple[Fit, list[KVBlock]]:
    if len(prompts) < LEAST_HELD_OUT:
        raise CalibrationError(
            f"{len(prompts)} held-out prompts; a pack needs at least {LEAST_HELD_OUT}: "
            f"give at least {LEAST_HELD_OUT * HELD_OUT_EVERY} prompts"
        )
    errors = HeldOut(fit.maps)
    blocks = []
    for ids in prompts:
        [(left, right)] = _capture(source, target, [ids])
        errors.add(left, right)
        blocks.append(left)
    return held_out(fit, errors), blocks
