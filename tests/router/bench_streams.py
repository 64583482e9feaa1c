"""What the router adds to each event of many concurrent streams:  python -m tests.router.bench_streams

Worker and router run in processes of their own, the client in this one. Every event carries the time at which the
worker sent it. Direct connection and router are measured in turn, so that a busy machine is busy for both.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import httpx
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter
from rich.console import Console
from rich.progress import track
from rich.table import Table

from router import processes
from tests.router.fake_worker import free_port, until
from tests.router.streams import SERVED, Event, Order, ask_all


class Figures(NamedTuple):
    """Milliseconds from the worker to the client."""

    events: int
    median: float
    p90: float
    p99: float
    first_median: float

    @classmethod
    def of(cls, streams: list[list[Event]]) -> Figures:
        took = _took(streams)
        cuts = statistics.quantiles(took, n=100)
        firsts = [events[0].took_ms for events in streams]
        return cls(len(took), statistics.median(took), cuts[89], cuts[98], statistics.median(firsts))


def bench(
    streams: Annotated[int, typer.Option(min=2, help="at once")] = 1000,
    events: Annotated[int, typer.Option(min=1, help="per stream")] = 10,
    pause_s: Annotated[float, typer.Option(min=0, help="before each event of a stream")] = 4.0,
    ramp_s: Annotated[float, typer.Option(min=0, help="over which the streams begin")] = 20.0,
    rounds: Annotated[int, typer.Option(min=1, help="of direct and router in turn")] = 2,
    results: Annotated[Path, typer.Option(help="where the figures go")] = Path("results/streams.json"),
) -> None:
    """Prints the median time of an event with and without the router, and what the router adds."""
    console = Console(stderr=True)
    seen: dict[str, list[list[Event]]] = {"direct": [], "router": []}
    with ExitStack() as stack:
        direct, through = stack.enter_context(_worker()), free_port()
        stack.enter_context(_router(direct, through))
        expected_s = 2 * rounds * (ramp_s + events * pause_s)
        console.print(f"{streams} streams, {streams / pause_s:,.0f} events a second; about {expected_s:.0f} s")
        for number in track(range(rounds), "rounds", console=console):
            for way, port in (("direct", direct), ("router", through)):
                orders = [Order(f"{number}-{place}", events, pause_s) for place in range(streams)]
                answers = asyncio.run(ask_all("127.0.0.1", port, orders, SERVED, ramp_s))
                _check(orders, answers)
                seen[way] += answers
    figures = {way: Figures.of(answers) for way, answers in seen.items()}
    added = figures["router"].median - figures["direct"].median
    _show(figures, added)
    told = {way: told._asdict() for way, told in figures.items()}
    asked = {"streams": streams, "events": events, "pause_s": pause_s, "ramp_s": ramp_s, "rounds": rounds}
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps({"asked": asked, "ms": told, "added_median_ms": added}, indent=1) + "\n")
    title = f"{streams:,} concurrent streams, {streams / pause_s:,.0f} events a second"
    _plot({way: _took(answers) for way, answers in seen.items()}, title, results.with_suffix(".png"))


def _took(streams: list[list[Event]]) -> list[float]:
    return [event.took_ms for events in streams for event in events]


def _check(orders: list[Order], answers: list[list[Event]]) -> None:
    for order, events in zip(orders, answers, strict=True):
        expected = [(order.name, number) for number in range(order.events)]
        assert [(event.name, event.number) for event in events] == expected, f"{order.name}: lost or reordered"


def _show(figures: dict[str, Figures], added: float) -> None:
    table = Table("", "events", "median, ms", "p90, ms", "p99, ms", "first event, median, ms")
    for way, told in figures.items():
        table.add_row(way, f"{told.events:,}", *(f"{value:.2f}" for value in told[1:]))
    Console().print(table)
    Console().print(f"added at the median: {added:.2f} ms")


def _plot(took_ms: dict[str, list[float]], title: str, path: Path) -> None:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (way, took), colour in zip(took_ms.items(), ("#777777", "#1f78b4"), strict=True):
        axes.ecdf(took, color=colour, label=f"{way}: median {statistics.median(took):.2f} ms")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    axes.set_xlabel("time of an event from the worker to the client (ms)")
    axes.set_ylabel("events that took no longer (%)")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)


@contextmanager
def _worker() -> Iterator[int]:
    """A worker in a process of its own; yields its port."""
    port = free_port()
    words = ["uvicorn", "tests.router.streams:worker", "--port", str(port), "--log-level", "critical"]
    with _running([sys.executable, "-m", *words, "--lifespan", "off"], port):
        yield port


@contextmanager
def _router(worker_port: int, port: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "router.yaml"
        config.write_text(
            f"listen: {{port: {port}}}\n"
            f"tiers: [{{name: only, served: {SERVED}, address: 'http://127.0.0.1:{worker_port}'}}]\n"
            "policies: {p: {method: never}}\ndefault_policy: p\n"
            "limits: {max_in_flight: 20000, connect_s: 60, first_token_s: 600}\n"  # on a busy machine too
        )
        with _running([sys.executable, "-m", "router.cli", "router", "-c", str(config)], port):
            yield


@contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        child = processes.start(command, Path(folder) / "log")
        try:
            until(lambda: _answers(port), 60)
            yield
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    except httpx.TransportError:
        time.sleep(0.2)
        return False


if __name__ == "__main__":
    typer.run(bench)
