"""One prompt, token by token: what each selector would recompute, and its scores (figures 3 and 13)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang_ext.offline.evaluate.oracles import MAPPING_ERROR, TARGET_ATTENTION
from sglang_ext.offline.evaluate.run import Evaluation, Pair
from sglang_ext.offline.evaluate.template import Template
from sglang_ext.transfer.selectors import RANDOM, RANK_DISAGREEMENT, SOURCE_ATTENTION, Fraction, top_positions

SHOWN = (RANK_DISAGREEMENT, MAPPING_ERROR, TARGET_ATTENTION, SOURCE_ATTENTION, RANDOM)


@dataclass(frozen=True)
class Strip:
    """tokens: the prompt's tokens as text, less the last; template: bool [T - 1]; scores and chosen by selector."""

    pack: str
    rho: float
    tokens: list[str]
    template: torch.Tensor
    scores: dict[str, torch.Tensor]
    chosen: dict[str, torch.Tensor]


def strip(evaluation: Evaluation, pair: Pair, ids: list[int], template: Template, tokenizer: Any, rho: float) -> Strip:
    """Runs one prompt's prefills and map, and scores its tokens by every selector."""
    natives, _ = evaluation.target.executor.prefill([ids])
    [case] = evaluation.cases(pair, [ids], natives, attention=True)
    scores = {name: case.scores(name).cpu() for name in SHOWN}
    return Strip(
        pair.pack.manifest.name, rho, _texts(tokenizer, ids[:-1]), template.mask(ids)[:-1], scores,
        {name: top_positions(score, Fraction(rho)) for name, score in scores.items()},
    )  # fmt: skip


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    return [tokenizer.decode([token]).replace("\n", "⏎") for token in ids]
