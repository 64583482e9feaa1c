"""The generator against a fake server in another process."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import Client
from loadtest.generator import OpenLoop, Tags
from loadtest.rows import Row
from loadtest.schedule import Arrival
from loadtest.systems import Chat

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running fake server."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.url = f"http://127.0.0.1:{int(process.stdout.readline())}"

    def stats(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/stats") as answer:
            return json.load(answer)


@contextmanager
def serving(**options: Any) -> Iterator[Server]:
    """A fake server with these options (`fake_server.main`)."""
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    command = [sys.executable, "-m", "tests.loadtest.fake_server", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            yield Server(process)
        finally:
            process.kill()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(serving(**options))


@pytest.fixture(scope="session")
def standing() -> Iterator[Server]:
    """One that answers at once; for tests that do not look at its counters."""
    with serving() as server:
        yield server


def numbered(arrivals: Sequence[Arrival]) -> dict[int, str]:
    """Prompts whose first word is the index."""
    return {arrival.index: f"{arrival.index} words" for arrival in arrivals}


def loop(url: str, arrivals: Sequence[Arrival], rows: list[Row], model: str = "plain", **more: Any) -> OpenLoop:
    """An open loop whose rows go to a list."""
    system = more.pop("system", None) or Chat("fake", Client(url, timeout_s=20), model)
    return OpenLoop(system, arrivals, numbered(arrivals), Tags(seed=0, rate=1.0), rows.append, **more)


def measure(url: str, arrivals: Sequence[Arrival], **more: Any) -> list[Row]:
    """The rows of a whole run, by arrival."""
    rows: list[Row] = []
    loop(url, arrivals, rows, **more).run()
    return sorted(rows, key=lambda row: row.index)
