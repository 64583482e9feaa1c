"""The acceptance record of a pack: what the lift keeps of the target, measured on held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.offline.executor import Probe, Row, TransformersExecutor, Work
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.pack import Acceptance, Arm
from sglang_ext.transfer.selectors import (
    RANK_DISAGREEMENT,
    Budget,
    Scorer,
    budget_of,
    needs_attention,
    scorer_named,
)

CONTINUATION = 24  # tokens of the target's own greedy answer that each arm is scored on
LEAST_PROMPTS = 2  # the wrong prompt's arm needs another one


@dataclass(frozen=True)
class Repair:
    """What the lifted arms recompute: a selector by name, and a budget rho or, where given, a coverage.

    Raises PlanError for a selector that is not known.
    """

    selector: str = RANK_DISAGREEMENT
    rho: float = 0.3
    coverage: float | None = None

    def __post_init__(self) -> None:
        scorer_named(self.selector)

    @property
    def scorer(self) -> Scorer:
        return scorer_named(self.selector)

    @property
    def budget(self) -> Budget:
        return budget_of(self.rho, self.coverage)


class Forced(NamedTuple):
    """A teacher-forced continuation: log-probabilities [n, V] and attention outputs [layers, n, heads, d]."""

    log_probs: torch.Tensor
    attention: torch.Tensor


def measure(
    source: TransformersExecutor,
    target: TransformersExecutor,
    prompts: Sequence[Sequence[int]],
    maps: CrossModelMap,
    repair: Repair,
    tick: Callable[[], None],
) -> Acceptance:
    """Four arms over held-out prompts (token ids), and the attention cosine per layer.

    Each arm continues from another cache with the same tokens, the target's own greedy ones: its own
    cache, the lifted one, one lifted from the next prompt in the list, and none. Calls `tick` per prompt. Holds
    two source blocks at a time, whatever the number of prompts. Raises CalibrationError for fewer than two.
    """
    if len(prompts) < LEAST_PROMPTS:
        raise CalibrationError(f"{len(prompts)} prompts; an acceptance record needs at least {LEAST_PROMPTS}")
    arms: dict[str, list[tuple[float, float, int]]] = {"target": [], "lifted": [], "wrong_prompt": [], "no_context": []}
    cosines, shares = [], []
    block = source_block(source, prompts[0], repair.selector)
    for index, ids in enumerate(prompts):
        other = prompts[(index + 1) % len(prompts)]
        block_of_other = source_block(source, other, repair.selector)
        rows, logits = target.prefill([ids], spare=CONTINUATION)
        answer = target.greedy(rows, logits, CONTINUATION, stop=[])[0]
        native = force(target, _native(target, ids), ids, answer)
        row, share = _lifted(target, ids, block, maps, repair)
        lifted = force(target, row, ids, answer)
        caches = {
            "target": native,
            "lifted": lifted,
            "wrong_prompt": force(target, _lifted(target, other, block_of_other, maps, repair)[0], other, answer),
            "no_context": force(target, target.row(1 + CONTINUATION), ids[-1:], answer),
        }
        for name, forced in caches.items():
            arms[name].append(compare(native, forced, answer))
        cosines.append(
            torch.cosine_similarity(native.attention.flatten(2), lifted.attention.flatten(2), dim=-1).mean(1)
        )
        shares.append(share)
        block = block_of_other
        tick()
    return Acceptance(
        rho=repair.rho if repair.coverage is None else round(sum(shares) / len(shares), 4),
        coverage=repair.coverage, selector=repair.selector, prompts=len(prompts),
        attention_cosine=tuple(round(x, 4) for x in torch.stack(cosines).mean(0).tolist()),
        **{name: _mean(rows) for name, rows in arms.items()},
    )  # fmt: skip


def source_block(source: TransformersExecutor, ids: Sequence[int], selector: str) -> KVBlock:
    """One prompt's block, with the attention that its tokens received where the selector reads it."""
    [row], _ = source.prefill([ids])
    return source.block(row, ids, source.attention_received(row, ids) if needs_attention(selector) else None)


def _native(target: TransformersExecutor, ids: Sequence[int]) -> Row:
    return target.prefill([ids], spare=CONTINUATION)[0][0]


def _lifted(
    target: TransformersExecutor, ids: Sequence[int], block: KVBlock, maps: CrossModelMap, repair: Repair
) -> tuple[Row, float]:
    """The lifted row, and the share of its positions that were recomputed."""
    [row], _, [plan] = target.lift([ids], [block], maps, repair.scorer, repair.budget, spare=CONTINUATION)
    return row, len(plan.compute) / len(ids)


def force(target: TransformersExecutor, row: Row, ids: Sequence[int], answer: Sequence[int]) -> Forced:
    """Runs the prompt's last token and the answer but its last one behind the row's first len(ids) - 1."""
    tokens = torch.tensor([ids[-1], *answer[:-1]])
    positions = torch.arange(len(ids) - 1, len(ids) - 1 + len(tokens))
    probe = Probe()
    hidden = target.compute([Work(row, tokens, positions)], probe)[0]
    return Forced(target.logits(hidden).log_softmax(-1), torch.stack(probe.outputs))


def compare(native: Forced, other: Forced, answer: Sequence[int]) -> tuple[float, float, int]:
    """Agreeing tokens, summed KL (nats), tokens."""
    agree = int((other.log_probs.argmax(-1).cpu() == torch.tensor(answer)).sum())
    kl = (native.log_probs.exp() * (native.log_probs - other.log_probs)).sum()
    return agree, max(0.0, float(kl)), len(answer)


def _mean(rows: Iterable[tuple[float, float, int]]) -> Arm:
    agree, kl, count = (sum(column) for column in zip(*rows))
    return Arm(agreement=round(agree / count, 5), kl=round(kl / count, 6))
