"""The one pass over the corpus: captures both models' caches, adds them to the moments, holds some prompts out."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import BlockError, CalibrationError
from sglang_ext.offline.checkpoint import START, Checkpoint, Position
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.settings import Progress, Settings
from sglang_ext.transfer.fit import MapFitter

HELD_OUT_EVERY = 10  # each tenth prompt measures what the others fitted
BATCH = 8


class Pair(NamedTuple):
    """The two models of a pack, and what to call them."""

    source: TransformersExecutor
    target: TransformersExecutor
    names: tuple[str, str]


class Prompt(NamedTuple):
    """Token ids, and the prompt's number in the corpus, from 1."""

    number: int
    ids: list[int]


class Collected(NamedTuple):
    """What the pass leaves behind: all of bounded size."""

    fitter: MapFitter
    held_out: list[Prompt]
    corpus_digest: str


def collect(
    pair: Pair,
    corpus: str,
    prompts: Iterable[list[int]],
    settings: Settings,
    progress: Progress,
    checkpoint: Checkpoint | None,
) -> Collected:
    """Runs prompts until `settings.tokens` are fitted and prompts enough are held out.

    Goes on from the checkpoint where there is one: the prompts up to it are read again but not run, which brings
    back the held-out ones and the state of the strides, so that the moments are those of an uninterrupted pass to
    the bit. Raises CalibrationError for an empty corpus, one that changed since the checkpoint, and for NaN.
    """
    fitter = MapFitter(pair.source.geometry, pair.target.geometry, pair.target.model.device)
    made_for = _made_for(pair, corpus, settings)
    resumed = START
    if checkpoint is not None and (found := checkpoint.load(made_for)) is not None:
        resumed, state = found
        fitter.restore(state)
        progress.resumed(resumed.prompts)
    kept = _Kept(settings.accept_prompts)
    digest = hashlib.sha256()
    offsets = random.Random(settings.seed)
    fitted = tokens = saved_at = 0
    for batch in _batches(kept.divert(prompts, lambda: tokens >= settings.tokens)):
        strides = [range(offsets.randrange(settings.stride), len(ids), settings.stride) for _, ids in batch]
        for _, ids in batch:
            digest.update(repr(ids).encode())
        replayed = fitted < resumed.prompts
        fitted += len(batch)
        tokens += sum(map(len, strides))
        here = Position(fitted, digest.hexdigest())
        if replayed:
            saved_at = tokens
            if fitted >= resumed.prompts and here != resumed:
                raise _changed(corpus)
        else:
            for rows, (left, right) in zip(strides, capture(pair, batch)):
                fitter.add(left, right, torch.tensor(rows, dtype=torch.int64))
            if checkpoint is not None and tokens - saved_at >= checkpoint.every:
                checkpoint.save(fitter.state(), here, made_for)
                saved_at = tokens
        progress.tokens(min(tokens, settings.tokens), settings.tokens)
    if fitted < resumed.prompts:
        raise _changed(corpus)
    if fitted == 0:
        raise CalibrationError(f"{corpus} holds no prompts of two tokens or more")
    if checkpoint is not None and tokens > saved_at:
        checkpoint.save(fitter.state(), Position(fitted, digest.hexdigest()), made_for)
    if kept.left_out:
        progress.left_out(kept.left_out)
    return Collected(fitter, kept.prompts, digest.hexdigest())


def capture(pair: Pair, batch: Sequence[Prompt]) -> Iterator[tuple[KVBlock, KVBlock]]:
    """Both models' blocks of each prompt. Raises CalibrationError that names model and prompt for NaN or infinity."""
    ids = [prompt.ids for prompt in batch]
    left, _ = pair.source.prefill(ids)
    right, _ = pair.target.prefill(ids)
    for prompt, one, other in zip(batch, left, right):
        blocks = pair.source.block(one, prompt.ids), pair.target.block(other, prompt.ids)
        for name, block in zip(pair.names, blocks):
            try:
                block.check_finite()
            except BlockError as error:
                raise CalibrationError(f"prompt {prompt.number} of the corpus, model {name}: {error}") from error
        yield blocks


class _Kept:
    """Every tenth prompt, held out of the fit, up to the number that acceptance wants."""

    def __init__(self, wanted: int) -> None:
        self.prompts: list[Prompt] = []
        self.left_out = 0
        self._wanted = wanted

    def divert(self, prompts: Iterable[list[int]], fitted: Callable[[], bool]) -> Iterator[Prompt]:
        """The prompts to fit, until `fitted` says enough; from then on every prompt is held out."""
        for index, ids in enumerate(prompts):
            enough = fitted()
            if enough and len(self.prompts) >= self._wanted:
                return
            if len(ids) < 2:
                self.left_out += 1
            elif not enough and index % HELD_OUT_EVERY != HELD_OUT_EVERY - 1:
                yield Prompt(index + 1, ids)
            elif len(self.prompts) < self._wanted:
                self.prompts.append(Prompt(index + 1, ids))


def _batches(prompts: Iterator[Prompt]) -> Iterator[list[Prompt]]:
    while batch := list(islice(prompts, BATCH)):
        yield batch


def _made_for(pair: Pair, corpus: str, settings: Settings) -> dict[str, str]:
    """All that the moments depend on. What is solved from them (structure, k, rank, ridge, dtype) may still change."""
    models = {
        f"{role} {field}": value
        for role, one in (("source", pair.source), ("target", pair.target))
        for field, value in {**one.identity.to_json(), "dtype": one.model.dtype, "device": one.model.device}.items()
    }
    settled = {"corpus": corpus, "tokens": settings.tokens, "stride": settings.stride, "seed": settings.seed}
    return {name: str(value) for name, value in {**models, **settled}.items()}


def _changed(corpus: str) -> CalibrationError:
    return CalibrationError(f"{corpus} is not what it was when the checkpoint was written; delete it to start afresh")
