"""From two models and a corpus to packs: one pass, a fit and a held-out fit per structure, acceptance."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import torch

from sglang_ext.errors import CalibrationError
from sglang_ext.offline import acceptance
from sglang_ext.offline.checkpoint import Checkpoint
from sglang_ext.offline.collect import HELD_OUT_EVERY, Pair, Prompt, capture, collect
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.settings import Progress, Settings
from sglang_ext.transfer.fit import Fit, HeldOut, check_shapes, held_out
from sglang_ext.transfer.maps import Structure
from sglang_ext.transfer.pack import Manifest, ModelRecord, Pack


def calibrate(
    source: TransformersExecutor,
    target: TransformersExecutor,
    names: tuple[str, str],
    corpus: str,
    prompts: Iterable[list[int]],
    settings: Settings,
    progress: Progress,
    checkpoint: Checkpoint | None = None,
) -> dict[Structure, Pack]:
    """A fitted, measured pack per structure, not yet saved.

    names: of source and target; corpus: what the manifest says of the prompts; prompts: token ids,
    read once. Memory holds the moments, one batch and the held-out prompts' ids, whatever the corpus. The
    checkpoint is left as it is at the end of the pass: delete it when the packs are saved.
    Raises CalibrationError where corpus or settings cannot give a map.
    """
    pair = Pair(source, target, names)
    _check(pair, settings)
    fitter, kept, digest = collect(pair, corpus, prompts, settings, progress, checkpoint)
    fits = {
        structure: fitter.solve(settings.k, settings.rank, settings.ridge, getattr(torch, settings.dtype), structure)
        for structure in settings.structures
    }
    fits = _held_out_fits(fits, pair, kept)
    made = {
        "source": ModelRecord.of(names[0], source.identity, source.geometry),
        "target": ModelRecord.of(names[1], target.identity, target.geometry),
        "corpus": corpus, "corpus_digest": digest, "tokens": fitter.count,
        **{name: getattr(settings, name) for name in ("dtype", "k", "rank", "ridge", "stride", "seed", "bench_only")},
    }  # fmt: skip
    seen, ids = count(1), [prompt.ids for prompt in kept]
    packs = {}
    for structure, fit in fits.items():
        record = None
        if not settings.bench_only:
            record = acceptance.measure(
                source, target, ids, fit.maps, settings.repair,
                lambda: progress.prompts(next(seen), len(fits) * len(ids)),
            )  # fmt: skip
        name = settings.name if len(fits) == 1 else f"{settings.name}-{structure}"
        manifest = Manifest(name=name, structure=structure, layers=fit.records, acceptance=record, **made)
        packs[structure] = Pack(manifest, fit.maps)
    return packs


def _check(pair: Pair, settings: Settings) -> None:
    """What can be refused before the pass is refused before the pass."""
    ours, theirs = pair.source.identity, pair.target.identity
    if (ours.tokenizer, ours.template) != (theirs.tokenizer, theirs.template):
        raise CalibrationError(
            f"{pair.names[0]} and {pair.names[1]} have different tokenizers or chat templates: "
            "a cache can only be handed over where both render the same messages to the same ids"
        )
    if settings.accept_prompts < acceptance.LEAST_PROMPTS:
        raise CalibrationError(
            f"accept_prompts is {settings.accept_prompts}; a pack needs at least {acceptance.LEAST_PROMPTS}"
        )
    for structure in settings.structures:
        check_shapes(pair.source.geometry, pair.target.geometry, settings.k, settings.rank, structure)


def _held_out_fits(fits: dict[Structure, Fit], pair: Pair, prompts: Sequence[Prompt]) -> dict[Structure, Fit]:
    least = acceptance.LEAST_PROMPTS
    if len(prompts) < least:
        raise CalibrationError(
            f"{len(prompts)} held-out prompts; a pack needs at least {least}: give at least {least * HELD_OUT_EVERY} prompts"
        )
    errors = {structure: HeldOut(fit.maps) for structure, fit in fits.items()}
    for prompt in prompts:
        [(left, right)] = capture(pair, [prompt])
        for one in errors.values():
            one.add(left, right)
    return {structure: held_out(fit, errors[structure]) for structure, fit in fits.items()}
