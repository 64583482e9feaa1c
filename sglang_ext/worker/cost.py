"""What a native prefill and a lift cost on this worker, and which is faster.

A forward over n tokens that together see p keys takes a + b n + c p milliseconds: the weights are read once,
each token passes the layers, each query meets each key up to its own position. A lift adds what its map takes
per token and the transport per byte. The figures are fitted once, at start-up (measure.py), alone on the
worker; a batch shares a, so that they judge one request. HTTP, a few milliseconds, is not in them.
"""

from __future__ import annotations

from itertools import combinations
from typing import Sequence

import torch
from pydantic import BaseModel, ConfigDict

from sglang_ext.plan import budget_size

LIFT = "lift"
NATIVE = "native"


class _Figures(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ForwardCost(_Figures):
    """Milliseconds of one forward: constant + per_token n + per_key p, p being the keys seen, summed over queries."""

    constant: float
    per_token: float
    per_key: float

    def ms(self, tokens: float, keys: float) -> float:
        return self.constant + self.per_token * tokens + self.per_key * keys if tokens else 0.0

    @classmethod
    def fitted(cls, samples: Sequence[tuple[int, int, float]]) -> ForwardCost:
        """samples: tokens, keys seen and milliseconds of each forward that was measured."""
        terms = [[1.0, tokens, keys] for tokens, keys, _ in samples]
        constant, per_token, per_key = nonnegative_fit(terms, [ms for _, _, ms in samples])
        return cls(constant=constant, per_token=per_token, per_key=per_key)


class PackCost(_Figures):
    """What lifting through one pack adds: milliseconds of the map per token, bytes of the block per token."""

    map_ms_per_token: float
    bytes_per_token: int


class Choice(_Figures):
    """Expected milliseconds to the first token's logits either way, and what was done: `lift` or `native`."""

    native_ms: float
    lift_ms: float
    chosen: str


class CostModel(_Figures):
    """One worker's figures. packs: by digest."""

    native: ForwardCost
    recompute: ForwardCost
    transfer_ms_per_byte: float
    packs: dict[str, PackCost]

    def native_ms(self, length: int, cached: int = 0) -> float:
        """A native prefill of `length` tokens behind `cached` ones; the last token is always computed."""
        tokens = length - min(cached, length - 1)
        return self.native.ms(tokens, keys_seen(length, tokens))

    def lift_ms(self, pack: str, length: int, budget: float, held: int = 0) -> float:
        """A lift of `length` tokens, of which the first `held` are here, with the last token in the same forward.

        budget: rho, or the coverage, which takes at most that share of the positions. Those that are
        recomputed are taken to lie evenly over the prompt.
        """
        one = self.packs[pack]
        free = length - 1 - min(held, length - 1)
        count = (budget_size(budget, length) - 1) * free / max(length - 1, 1)
        recompute = self.recompute.ms(count + 1, count * (2 * length - free) / 2 + length)
        mapped = (length - 1) * one.map_ms_per_token if free else 0.0
        transfer = length * one.bytes_per_token * self.transfer_ms_per_byte
        return transfer + mapped + recompute

    def choose(self, pack: str, length: int, budget: float, always: bool, cached: int = 0, held: int = 0) -> Choice:
        """The faster way, or the lift where it is wanted in any case.

        cached: tokens that a native prefill would find here; held: those that the lift would.
        """
        native, lift = self.native_ms(length, cached), self.lift_ms(pack, length, budget, held)
        return Choice(native_ms=native, lift_ms=lift, chosen=LIFT if always or lift < native else NATIVE)


def keys_seen(length: int, tokens: int) -> int:
    """Keys that the last `tokens` queries of `length` positions see, summed over queries."""
    return tokens * (2 * length - tokens + 1) // 2


def nonnegative_fit(terms: Sequence[Sequence[float]], measured: Sequence[float]) -> list[float]:
    """Coefficients >= 0, one per term, with the least squares of relative error; of equals, the fewest terms.

    terms: a row of term values per measurement; measured: positive. Tries every subset of terms: the best
    non-negative fit is the unconstrained one of its own support.
    """
    scaled = torch.tensor(terms, dtype=torch.float64) / torch.tensor(measured, dtype=torch.float64)[:, None]
    ones = torch.ones(len(measured), dtype=torch.float64)
    best, least = [0.0] * scaled.shape[1], float(len(measured))
    for size in range(1, scaled.shape[1] + 1):
        for support in combinations(range(scaled.shape[1]), size):
            columns = scaled[:, list(support)]
            # Terms differ by orders of magnitude; a column of norm 1 keeps the solver's precision.
            norms = columns.norm(dim=0)
            found = torch.linalg.lstsq(columns / norms, ones, driver="gelsd").solution / norms
            error = float((columns @ found - ones).square().sum())
            if bool((found >= 0).all()) and error < least - 1e-12:
                best, least = [0.0] * scaled.shape[1], error
                for index, value in zip(support, found.tolist()):
                    best[index] = value
    return best
