"""Saturation: mu, the requests per second that a system can answer at most, and S(b), how long a batch takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from loadtest.bench import Bench, Load, require_all
from loadtest.client import Answer
from loadtest.errors import LoadFailed
from loadtest.generator import Tags
from loadtest.lineup import SMALL, Entry, rho_of
from loadtest.progress import Progress
from loadtest.rows import Row
from loadtest.run import LARGE, BatchTime, Saturation
from loadtest.schedule import Arrival, at_once
from loadtest.simulate import CAP
from loadtest.systems import System

BATCHES = (1, 2, 4, 8, 16, 32)
FULL = 3
"""Maximum batches back to back, of equation 10."""

_PILOT = FULL * CAP  # its index: behind those of all others, so that its prompt is its own
_PILOT_LENGTH = 4  # times a prompt: long enough for a batch to gather behind it
_BEHIND_S = 0.02  # after the pilot
_SEED = 1_000_000  # prompts of their own, apart from any sweep's


def requests_of(systems: int, repeats: int, batches: Sequence[int]) -> int:
    """How many requests `three_batches` sends: the units that it advances its progress by."""
    return systems * (CAP + repeats * (FULL * CAP + sum(batches)))


def three_batches(
    bench: Bench, names: Sequence[str], tokens: int, repeats: int, batches: Sequence[int], progress: Progress
) -> Iterator[list[Saturation]]:
    """mu by equation 10 and S(b) for each of `batches`: after each repeat, what is known of all systems so far.

    mu = 3 * 32 requests, all sent at once, over the seconds until the last is answered. The systems take turns, so
    that a slow minute of the machine hits all alike. Raises what `Bench` does, and `BadSystem`.
    """
    tested = [_Tested(bench.entry(name), tokens) for name in names]
    for one in tested:
        progress.show(f"mu at {tokens} tokens: warming up {one.entry.name}")
        bench.warm_up(one.entry, CAP, _SEED - 1, tokens)
        progress.advance(CAP)
    for repeat in range(repeats):
        for one in tested:
            progress.show(f"mu at {tokens} tokens: {one.entry.name}, {repeat + 1} of {repeats}")
            one.fill_queue(bench, _SEED + repeat, progress)
            for batch in batches:
                one.time_batch(bench, _SEED + repeat, batch, progress)
        yield [one.saturation() for one in tested]


@dataclass
class _Tested:
    """One system and what has been measured of it."""

    entry: Entry
    tokens: int
    rates: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    times: dict[int, list[tuple[float, int | None]]] = field(default_factory=dict)

    def fill_queue(self, bench: Bench, seed: int, progress: Progress) -> None:
        arrivals = at_once(FULL * CAP)
        texts = bench.texts(arrivals, seed, self.tokens)
        bench.prepare(self.entry, texts)
        load = bench.load(self.entry, arrivals, texts, Tags(seed=seed), lambda _: progress.advance(1))
        self._require_answered(load.rows)
        self.rates.append(len(load.rows) / max(row.end_s for row in load.rows))
        progress.note(f"{self.entry.name}, {self.tokens} tokens: {self.rates[-1]:.2f} requests/s")
        if load.counted.mean_batch is not None:
            self.sizes.append(load.counted.mean_batch)

    def time_batch(self, bench: Bench, seed: int, batch: int, progress: Progress) -> None:
        """One request alone: its time to first token on an idle server. More gather behind a longer one, the pilot,
        so that they go as one batch, and S is what they add to the pilot's own time, which is taken right before.

        The pilot's own token says nothing of when the batch began: SGLang looks at the results of one batch after it has
        launched the next, and on a CPU a launch returns when all is computed.
        """
        arrivals = [Arrival(index, 0.0 if batch == 1 else _BEHIND_S) for index in range(batch)]
        texts = bench.texts(arrivals, seed, self.tokens)
        sent, pilot_s, pilots = self.entry, 0.0, []
        if batch > 1:
            ahead = bench.entry(SMALL if self.entry.name == SMALL else LARGE)
            pilots = [Arrival(_PILOT, 0.0, context_tokens=_PILOT_LENGTH * self.tokens)]
            pilot_texts = bench.texts(pilots, seed, self.tokens)
            bench.prepare(ahead, {})
            pilot_s = self._last_token(bench.load(ahead, pilots, pilot_texts, Tags(seed=seed)))
            texts |= pilot_texts
            sent = replace(self.entry, system=_BehindPilot(ahead.system, self.entry.system))
        bench.prepare(self.entry, {index: text for index, text in texts.items() if index != _PILOT})
        load = bench.load(sent, [*pilots, *arrivals], texts, Tags(seed=seed))
        progress.advance(batch)
        self._require_answered([row for row in load.rows if row.index != _PILOT])
        number = load.counted.batches
        if number is not None and pilots and not load.counted.values.get("lifts"):
            number -= 1  # the pilot's
        self.times.setdefault(batch, []).append((self._last_token(load) - pilot_s, number))

    @staticmethod
    def _last_token(load: Load) -> float:
        """Seconds from the load's beginning. Raises `LoadFailed`."""
        require_all(load.rows)
        return max(row.first_token_s or 0.0 for row in load.rows)

    def _require_answered(self, rows: Sequence[Row]) -> None:
        """A native prefill among lifts would pass for a slow lift. Raises `LoadFailed`."""
        require_all(rows)
        native = [row for row in rows if row.lift != "applied"]
        if rho_of(self.entry.name) is not None and native:
            raise LoadFailed(
                f"{self.entry.name}: {len(native)} of {len(rows)} lifts were not applied; the first: {native[0].lift_reason}"
            )

    def saturation(self) -> Saturation:
        return Saturation(
            system=self.entry.name,
            tokens=self.tokens,
            method="three_batches",
            repeats=self.rates,
            mean_batch=fmean(self.sizes) if self.sizes else None,
            service=[
                BatchTime(batch=batch, seconds=[s for s, _ in times], batches=[number for _, number in times])
                for batch, times in self.times.items()
            ],
        )


@dataclass(frozen=True)
class _BehindPilot:
    """The pilot goes another way than the rest."""

    pilot: System
    rest: System

    @property
    def name(self) -> str:
        return self.rest.name

    def check(self) -> None:
        self.rest.check()

    def send(self, arrival: Arrival, prompt: str) -> Answer:
        return (self.pilot if arrival.index == _PILOT else self.rest).send(arrival, prompt)
