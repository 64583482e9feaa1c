"""mu of a system that no single queue describes: between the largest rate that it holds and the smallest it does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from loadtest.bench import Bench, require_all
from loadtest.errors import LoadFailed
from loadtest.generator import Tags
from loadtest.progress import Progress
from loadtest.run import Saturation
from loadtest.schedule import at_once, constant
from loadtest.simulate import CAP

TRIAL = 4 * CAP
"""Arrivals of one trial."""

_MOST_TRIALS = 12
_GROWTH = 0.05  # of a quarter's arrivals, from one quarter to the next; less is the sawtooth of batches
_SEED = 2_000_000


def bracket(grows: Callable[[float], bool], guess: float, width: float = 0.1) -> tuple[float, float]:
    """The largest rate tried that did not grow, and the smallest that did: at most `width` of the latter apart.

    From `guess` by factors of 1.5 until there are both, then by halves. Raises `LoadFailed` where `grows` gives no
    bracket within twelve trials.
    """
    stable, unstable = 0.0, math.inf
    rate = guess
    for _ in range(_MOST_TRIALS):
        if grows(rate):
            unstable = rate
        else:
            stable = rate
        if unstable == math.inf:
            rate *= 1.5
        elif stable == 0:
            rate /= 1.5
        elif unstable - stable <= width * unstable:
            return stable, unstable
        else:
            rate = (stable + unstable) / 2
    raise LoadFailed(f"no rate found at which the queue begins to grow: last tried {rate:.3g} requests/s")


def queue_grows(scheduled_s: Sequence[float], answered_s: Sequence[float]) -> bool:
    """Whether requests come faster than they are answered: from the third quarter of the arrivals to the last, the
    mean number of requests in the system (seen by those that arrive) rises by more than 5 % of a quarter's arrivals.

    Both in order of arrival, seconds of one clock; needs a steady rate.
    """
    answered = sorted(answered_s)
    held, left = [], 0
    for number, now in enumerate(scheduled_s):
        while left < len(answered) and answered[left] <= now:
            left += 1
        held.append(number - left)
    quarter = len(held) // 4
    third, last = held[2 * quarter : 3 * quarter], held[3 * quarter : 4 * quarter]
    return fmean(last) - fmean(third) > max(1.0, _GROWTH * quarter)


def bisect(bench: Bench, name: str, tokens: int, width: float, progress: Progress) -> Saturation:
    """mu of a whole system as a bracket of arrival rates; the first guess is what it answers of a full queue.

    Raises what `Bench` does, `BadSystem`, and `LoadFailed` where no bracket is found.
    """
    tested = bench.entry(name)
    seeds = iter(range(_SEED, _SEED + _MOST_TRIALS + 1))

    def answered_at(rate: float | None) -> tuple[list[float], list[float]]:
        seed = next(seeds)
        arrivals = at_once(TRIAL) if rate is None else constant(rate, TRIAL)
        texts = bench.texts(arrivals, seed, tokens)
        bench.prepare(tested, texts)
        load = bench.load(tested, arrivals, texts, Tags(seed=seed, rate=rate))
        progress.advance(TRIAL)
        require_all(load.rows)
        return [row.scheduled_s for row in load.rows], [row.first_token_s or 0.0 for row in load.rows]

    progress.show(f"mu of the {name}: a full queue")
    guess = TRIAL / max(answered_at(None)[1])

    def grows(rate: float) -> bool:
        progress.show(f"mu of the {name}: does its queue grow at {rate:.2f} requests/s?")
        return queue_grows(*answered_at(rate))

    stable, unstable = bracket(grows, guess, width)
    return Saturation(system=name, tokens=tokens, method="bisection", stable=stable, unstable=unstable)
