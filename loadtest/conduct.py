"""One command's measurement in this process, from the first look at the servers to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from loadtest.bench import Bench
from loadtest.errors import Stopped
from loadtest.generator import stopping_on_signals
from loadtest.progress import RichProgress
from loadtest.prompts import ExactPrompts, PlainPrompts
from loadtest.protocols import Protocol, Saturations
from loadtest.report import report
from loadtest.run import Run, RunFolder, Settings
from loadtest.servers import Servers, Worker, this_machine
from loadtest.sweep import Plan, left_of, seconds_of, sweep
from sglang_ext.errors import KVLiftError

STOPPED = 130
"""The exit code of a run that a signal ended, as a shell has it for Ctrl-C."""

Measure = Callable[[Bench, RunFolder, Console], None]


@dataclass(frozen=True)
class Place:
    """Where the servers are. `target` is None where they are to be started."""

    target: str | None = None
    source: str | None = None
    router: str | None = None
    tokenizer: Path | None = None
    target_threads: int | None = None
    source_threads: int | None = None


def conduct(
    path: Path, place: Place, settings: Settings | None, measure: Measure, ttft_limit_s: float, console: Console
) -> int:
    """Measures into the folder and reports what there is, however it ended. Returns the exit code.

    settings: None keeps those of the folder. Says what went wrong on the console; raises nothing of `KVLiftError`.
    """
    folder = RunFolder(path)
    code = 0
    try:
        bench = _begin(folder, place, settings)
        with stopping_on_signals(bench.stop):
            measure(bench, folder, console)
    except Stopped as error:
        console.print(f"{error}; what was measured is kept in {path}", highlight=False)
        code = STOPPED
    except KVLiftError as error:
        _complain(error, console)
        code = 1
    if folder.begun:
        try:
            report(folder, ttft_limit_s, Console())
        except KVLiftError as error:
            _complain(error, console)
            code = code or 1
    return code


def measure_mu(wanted: Saturations, bench: Bench, folder: RunFolder, console: Console) -> None:
    """With a bar. Raises what `Saturations.measure` does."""
    console.print(
        f"mu at {wanted.tokens} tokens: {wanted.units} requests to {', '.join(wanted.systems)}", highlight=False
    )
    with RichProgress(wanted.units, console) as progress:
        wanted.measure(bench, folder, progress)


def measure_sweep(plan: Plan, bench: Bench, folder: RunFolder, console: Console) -> None:
    """With a bar, and how long it will take. Raises what `sweep` does."""
    run = folder.load()
    left = left_of(plan, run)
    seconds = seconds_of(left, run)
    console.print(
        f"sweep: {len(left)} points to measure, {len(list(plan.points())) - len(left)} there already; mu is "
        f"{run.mu_target:.2f} requests/s, so about {_long(seconds)}, and a few seconds per point to prefill and drain",
        highlight=False,
    )
    with RichProgress(seconds, console) as progress:
        sweep(bench, folder, plan, progress)


def measure_all(protocol: Protocol, bench: Bench, folder: RunFolder, console: Console) -> None:
    """Every part of a protocol that the folder does not hold yet. Raises what the parts do."""
    for wanted in protocol.mus:
        if (left := wanted.not_in(folder.load())).systems:
            measure_mu(left, bench, folder, console)
    run = folder.load()
    folder.save(run.model_copy(update={"settings": protocol.settings_within(run)}))
    measure_sweep(protocol.plan, bench, folder, console)


def _begin(folder: RunFolder, place: Place, settings: Settings | None) -> Bench:
    assert place.target is not None
    target = Worker(place.target, place.target_threads)
    source = Worker(place.source, place.source_threads) if place.source else None
    kept = folder.load().settings if settings is None and folder.begun else settings or Settings()
    served = source.served if source else None
    folder.begin(Run(settings=kept, machine=this_machine(), target=target.served, source=served))
    prompts = ExactPrompts(place.tokenizer) if place.tokenizer else PlainPrompts()
    return Bench(Servers(target, source, place.router), prompts)


def _complain(error: KVLiftError, console: Console) -> None:
    console.print(f"kvlift: {error}", style="red", highlight=False, markup=False)


def _long(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds > 5400 else f"{seconds / 60:.0f} minutes"
