"""The acceptance record of a pack: what the lift keeps of the target, measured on held-out prompts."""

from __future__ import annotations

from typing import Callable, Iterable, NamedTuple, Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.offline.executor import Probe, Row, TransformersExecutor, Work
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.pack import Acceptance, Arm
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, Fraction, scorer_named

CONTINUATION = 24  # tokens of the target's own greedy answer that each arm is scored on


class _Forced(NamedTuple):
    """A teacher-forced continuation: log-probabilities [n, V] and attention outputs [layers, n, heads, d]."""

    log_probs: torch.Tensor
    attention: torch.Tensor


def measure(
    target: TransformersExecutor,
    prompts: Sequence[Sequence[int]],
    blocks: Sequence[KVBlock],
    maps: CrossModelMap,
    rho: float,
    tick: Callable[[], None],
) -> Acceptance:
    """Four arms over held-out prompts and their source blocks, and the attention cosine per layer.

    Each arm continues from another cache with the same tokens, the target's own greedy ones: its own
    cache, the lifted one, one lifted from the next prompt in the list, and none. Calls `tick` per prompt.
    """
    arms: dict[str, list[tuple[float, float, int]]] = {"target": [], "lifted": [], "wrong_prompt": [], "no_context": []}
    cosines = []
    for index, ids in enumerate(prompts):
        wrong = (index + 1) % len(prompts)
        rows, logits = target.prefill([ids], spare=CONTINUATION)
        answer = target.greedy(rows, logits, CONTINUATION, stop=[])[0]
        native = _force(target, _native(target, ids), ids, answer)
        lifted = _force(target, _lifted(target, ids, blocks[index], maps, rho), ids, answer)
        other = prompts[wrong]
        caches = {
            "target": native,
            "lifted": lifted,
            "wrong_prompt": _force(target, _lifted(target, other, blocks[wrong], maps, rho), other, answer),
            "no_context": _force(target, target.row(1 + CONTINUATION), ids[-1:], answer),
        }
        for name, forced in caches.items():
            arms[name].append(_compare(native, forced, answer))
        cosines.append(torch.cosine_similarity(native.attention.flatten(2), lifted.attention.flatten(2), dim=-1).mean(1))
        tick()
    return Acceptance(
        rho=rho, selector=RANK_DISAGREEMENT, prompts=len(prompts),
        attention_cosine=tuple(round(x, 4) for x in torch.stack(cosines).mean(0).tolist()),
        **{name: _mean(rows) for name, rows in arms.items()},
    )  # fmt: skip


def _native(target: TransformersExecutor, ids: Sequence[int]) -> Row:
    return target.prefill([ids], spare=CONTINUATION)[0][0]


def _lifted(target: TransformersExecutor, ids: Sequence[int], block: KVBlock, maps: CrossModelMap, rho: float) -> Row:
    scorer = scorer_named(RANK_DISAGREEMENT)
    return target.lift([ids], [block], maps, scorer, Fraction(rho), spare=CONTINUATION)[0][0]


def _force(target: TransformersExecutor, row: Row, ids: Sequence[int], answer: Sequence[int]) -> _Forced:
    """Runs the prompt's last token and the answer but its last one behind the row's first len(ids) - 1."""
    tokens = torch.tensor([ids[-1], *answer[:-1]])
    positions = torch.arange(len(ids) - 1, len(ids) - 1 + len(tokens))
    probe = Probe()
    hidden = target.compute([Work(row, tokens, positions)], probe)[0]
    return _Forced(target.logits(hidden).log_softmax(-1), torch.stack(probe.outputs))


def _compare(native: _Forced, other: _Forced, answer: Sequence[int]) -> tuple[float, float, int]:
    """Agreeing tokens, summed KL (nats), tokens."""
    agree = int((other.log_probs.argmax(-1).cpu() == torch.tensor(answer)).sum())
    kl = (native.log_probs.exp() * (native.log_probs - other.log_probs)).sum()
    return agree, max(0.0, float(kl)), len(answer)


def _mean(rows: Iterable[tuple[float, float, int]]) -> Arm:
    agree, kl, count = (sum(column) for column in zip(*rows))
    return Arm(agreement=round(agree / count, 5), kl=round(kl / count, 6))
