"""What is measured, as two protocols: one that fits into a break, and the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from loadtest.bench import Bench
from loadtest.bracket import TRIAL, bisect
from loadtest.lineup import AUTOMATIC, CASCADE, PAPER, PAPER_LIFT
from loadtest.mu import BATCHES, requests_of, three_batches
from loadtest.progress import Progress
from loadtest.run import LARGE, Run, RunFolder, Settings
from loadtest.sweep import Plan, seconds_of

_BRACKET_WIDTH = 0.1
_LEAST_REQUESTS = 40  # per point: fewer say nothing of a queue
_USUAL_TRIALS = 6  # of a bisection, for the estimate of the time left


@dataclass(frozen=True)
class Saturations:
    """mu of some systems at one prompt length."""

    tokens: int
    systems: Sequence[str]
    repeats: int
    batches: Sequence[int]

    @property
    def units(self) -> int:
        """Of the progress that `measure` advances: requests."""
        return (
            requests_of(len(self._full), self.repeats, self.batches) + (CASCADE in self.systems) * _USUAL_TRIALS * TRIAL
        )

    def not_in(self, run: Run) -> Saturations:
        """What is left to measure."""

        def is_there(system: str) -> bool:
            found = run.saturation_of(system, self.tokens)
            return found is not None and (found.method == "bisection" or len(found.repeats) >= self.repeats)

        return replace(self, systems=[system for system in self.systems if not is_there(system)])

    @property
    def _full(self) -> list[str]:
        return [system for system in self.systems if system != CASCADE]

    def measure(self, bench: Bench, folder: RunFolder, progress: Progress) -> None:
        """Into `run.json`, after each repeat. Raises what `three_batches` and `bisect` do."""
        for system in self.systems:
            bench.entry(system)  # what is wrong with one is said before the first is measured
        for known in three_batches(bench, self._full, self.tokens, self.repeats, self.batches, progress):
            run = folder.load()
            for one in known:
                run = run.with_saturation(one)
            folder.save(run)
        if CASCADE in self.systems:
            folder.save(folder.load().with_saturation(bisect(bench, CASCADE, self.tokens, _BRACKET_WIDTH, progress)))


@dataclass(frozen=True)
class Protocol:
    """`sweep_s`: where set, each point gets fewer requests, as many as all points together can send in that time."""

    mus: Sequence[Saturations]
    settings: Settings
    plan: Plan
    sweep_s: float | None = None

    def settings_within(self, run: Run) -> Settings:
        """The settings for the sweep, once mu is known."""
        if self.sweep_s is None:
            return self.settings
        wanted = run.model_copy(update={"settings": self.settings})
        share = min(self.sweep_s / seconds_of(list(self.plan.points()), wanted), 1.0)
        requests = max(int(share * self.settings.requests), _LEAST_REQUESTS)
        return self.settings.model_copy(update={"requests": requests, "warm_up": requests // 10})


SHORT = Protocol(
    mus=(
        Saturations(149, (LARGE, "lift-0.2", PAPER_LIFT, "lift-0.5"), repeats=2, batches=(1, 4, 32)),
        Saturations(512, (LARGE, PAPER_LIFT), repeats=2, batches=(1,)),
    ),
    settings=Settings(),
    plan=Plan((LARGE, PAPER_LIFT, AUTOMATIC), us=(0.25, 0.7, 0.98), seeds=(0,)),
    sweep_s=15 * 60,
)
"""With a mu of 3 requests per second at 149 tokens, about half an hour, start-up included."""

FULL = Protocol(
    mus=(
        Saturations(149, PAPER, repeats=3, batches=BATCHES),
        Saturations(512, (LARGE, "lift-0.2", PAPER_LIFT, "lift-0.5"), repeats=3, batches=BATCHES),
    ),
    settings=Settings(),
    plan=Plan(PAPER, us=(0.5, 0.75, 0.98), seeds=(0, 1, 2)),
)
"""The paper's, and our systems beside its two, at a light load, a middle one and the paper's saturation.

With a mu of 6.4 requests per second at 149 tokens about three hours, with 3 about six; it goes on where it was stopped.
"""
