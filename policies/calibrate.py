"""From labelled outcomes to a threshold, and to what a cascade buys.

All follow the policies' rule: a request escalates when its score is under the threshold t. For n requests with small
model a_i and large model b_i right (0 to 1):

    rate(t)     share of the requests that escalate
    quality(t)  mean of b_i where they do and of a_i where they do not
    cost(t)     in calls of the large model: k + rate, where k is a small call's cost in large calls

The curve has one point for each distinct score, and one for escalating all. Between two points lies what escalating a
share of the tied requests by lot would give, a straight line.

    area        A = (integral of quality over rate from 0 to 1 - q_small) / (q_large - q_small)

With q_small = mean a, q_large = mean b. A score that knows nothing gives a straight line from q_small to q_large, so
A = 0.5: the small and the large model mixed by lot.

    break-even  r = 1 - k: above this rate, k + rate > 1, the cascade costs more than the large model alone
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Literal

from policies.outcomes import Outcome, OutcomesError

Higher = Literal["sure", "hard"]
"""What a higher score says of a request; the policies' own scores are `sure`, RouteLLM's win rates are `hard`."""

_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True)
class Point:
    """One threshold, in the unit of the scores, and what it gives."""

    threshold: float
    rate: float
    quality: float
    cost: float  # calls of the large model per request


@dataclass(frozen=True, slots=True)
class Goal:
    """What the threshold is chosen for.

    `rate`: the point nearest to it, of two the lower. `quality`: the lowest rate that reaches it. Neither: the best
    quality that costs no more than the large model alone.
    """

    rate: float | None = None
    quality: float | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found. The names are the keys of the JSON."""

    requests: int
    higher: Higher
    small_quality: float
    large_quality: float
    cost_ratio: float  # k
    break_even_rate: float
    area: float
    best_area: float  # of the score that knows which requests the large model gains
    goal: Goal
    chosen: Point
    curve: tuple[Point, ...]


def calibrate(outcomes: Sequence[Outcome], goal: Goal, cost_ratio: float, higher: Higher) -> Calibration:
    """Fits the threshold for the goal. Raises `OutcomesError` where the outcomes or the goal do not allow one."""
    _check(outcomes, goal, cost_ratio)
    points = curve(outcomes, cost_ratio, higher)
    ideal = [replace(o, score=o.small_right - o.large_right) for o in outcomes]
    break_even = max(0.0, 1.0 - cost_ratio)
    return Calibration(
        requests=len(outcomes),
        higher=higher,
        small_quality=points[0].quality,
        large_quality=points[-1].quality,
        cost_ratio=cost_ratio,
        break_even_rate=break_even,
        area=area(points),
        best_area=area(curve(ideal, cost_ratio, "sure")),
        goal=goal,
        chosen=_choose(points, goal, break_even),
        curve=points,
    )


def curve(outcomes: Sequence[Outcome], cost_ratio: float, higher: Higher) -> tuple[Point, ...]:
    """Every distinct choice that a threshold can make, by rising rate, from none to all."""
    sign = 1.0 if higher == "sure" else -1.0
    ordered = sorted(outcomes, key=lambda outcome: sign * outcome.score)
    n = len(ordered)
    right = math.fsum(outcome.small_right for outcome in ordered)
    escalated = 0
    points = []
    for score, tied in groupby(ordered, key=lambda outcome: outcome.score):
        points.append(Point(score, escalated / n, right / n, cost_ratio + escalated / n))
        for outcome in tied:
            right += outcome.large_right - outcome.small_right
            escalated += 1
    beyond = math.nextafter(ordered[-1].score, sign * math.inf)
    all_right = math.fsum(
        outcome.large_right for outcome in ordered
    )  # as summed alone, without the rounding on the way
    return (*points, Point(beyond, 1.0, all_right / n, cost_ratio + 1.0))


def area(points: Sequence[Point]) -> float:
    """The normalised area under quality over rate; 0.5 for mixing by lot. The qualities at the ends must differ."""
    under = math.fsum((b.rate - a.rate) * (a.quality + b.quality) / 2 for a, b in pairwise(points))
    return (under - points[0].quality) / (points[-1].quality - points[0].quality)


def _choose(points: Sequence[Point], goal: Goal, break_even: float) -> Point:
    if goal.rate is not None:
        wanted = goal.rate
        return min(points, key=lambda point: (abs(point.rate - wanted), point.rate))
    if goal.quality is not None:
        reached = [point for point in points if point.quality >= goal.quality - _ROUNDING]
        if not reached:
            best = max(points, key=lambda point: point.quality)
            raise OutcomesError(
                f"quality {goal.quality:g} is out of reach: the best is {best.quality:.4f}, at a rate of "
                f"{best.rate:.4f}; ask for less, or for a rate"
            )
        return reached[0]
    affordable = [point for point in points if point.rate <= break_even + _ROUNDING]
    return max(affordable, key=lambda point: (point.quality, -point.rate))


def _check(outcomes: Sequence[Outcome], goal: Goal, cost_ratio: float) -> None:
    if goal.rate is not None and goal.quality is not None:
        raise OutcomesError(f"rate {goal.rate:g} and quality {goal.quality:g} are both asked for; give one of them")
    for name, share in (("rate", goal.rate), ("quality", goal.quality)):
        if share is not None and not 0 <= share <= 1:
            raise OutcomesError(f"{name} is {share:g}; expected a share from 0 to 1")
    if not (cost_ratio > 0 and math.isfinite(cost_ratio)):
        raise OutcomesError(
            f"the cost ratio is {cost_ratio:g}; expected the cost of a small call in large calls, above 0"
        )
    if not outcomes:
        raise OutcomesError("no outcomes; give one line per request")
    n = len(outcomes)
    small = math.fsum(outcome.small_right for outcome in outcomes) / n
    large = math.fsum(outcome.large_right for outcome in outcomes) / n
    if small in (0.0, 1.0):
        always = "right" if small else "wrong"
        raise OutcomesError(
            f"one class only: the small model is {always} in all {n} outcomes, so no score can tell them apart; "
            "give requests of both kinds"
        )
    if large <= small:
        raise OutcomesError(
            f"escalating gains nothing: the large model is right in {large:.1%} and the small one in {small:.1%} of "
            f"{n} outcomes; are the two columns named the right way round?"
        )
    if len({outcome.score for outcome in outcomes}) == 1:
        raise OutcomesError(f"all {n} outcomes have the score {outcomes[0].score:g}; a threshold cannot divide them")
