"""Whether two arms differ on the same items: McNemar's exact test, and a sign-flip test for scores."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

_ENUMERATED = 12  # differences up to which every assignment of signs is counted
_FLIPS = 10_000


def mcnemar(only_one: int, only_other: int) -> float:
    """Two-sided exact p that the discordant pairs are a fair coin's.

    only_one: items that the first arm alone gets right; only_other: the second alone.
    """
    count = only_one + only_other
    tail = sum(math.comb(count, k) for k in range(min(only_one, only_other) + 1))
    return min(1.0, 2 * tail / 2**count)


def sign_flip(one: Sequence[float], other: Sequence[float], seed: int = 0) -> float:
    """Two-sided p that the mean paired difference is as large if each sign were a fair coin's.

    Exact for up to 12 differences, else from 10,000 draws (never 0 then).
    """
    differences = [a - b for a, b in zip(one, other, strict=True) if a != b]
    found = abs(math.fsum(differences)) - 1e-12  # sums of the same numbers in another order are equal
    if len(differences) <= _ENUMERATED:
        totals = [
            abs(math.fsum(s * d for s, d in zip(signs, differences)))
            for signs in product((1, -1), repeat=len(differences))
        ]
        return sum(total >= found for total in totals) / len(totals)
    rng = random.Random(seed)
    # In one order, so that the draws do not depend on the order of the items.
    differences.sort(key=lambda d: (abs(d), d))
    larger = sum(abs(math.fsum(d if rng.getrandbits(1) else -d for d in differences)) >= found for _ in range(_FLIPS))
    return (1 + larger) / (1 + _FLIPS)


def paired_p(one: Sequence[float], other: Sequence[float]) -> float:
    """McNemar where all scores are 0 or 1, else the sign-flip test."""
    pairs = list(zip(one, other, strict=True))
    if all(a in (0, 1) and b in (0, 1) for a, b in pairs):
        return mcnemar(sum(a > b for a, b in pairs), sum(b > a for a, b in pairs))
    return sign_flip(one, other)
