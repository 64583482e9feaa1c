"""Two fake workers in processes of their own, and what drives them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench import Bench
from loadtest.prompts import PlainPrompts
from loadtest.run import Machine, Run, RunFolder, Saturation, Served, Settings
from loadtest.servers import Servers, Worker
from tests.loadtest.conftest import ROOT

MACHINE = Machine(processor="slow", cores=2, memory_gb=8.0, python="3", kvlift="0", sglang="0")


@dataclass
class Told:
    """A progress that remembers."""

    shown: list[str] = field(default_factory=list)
    units: float = 0.0

    def show(self, what: str) -> None:
        self.shown.append(what)

    def advance(self, units: float) -> None:
        self.units += units

    def note(self, line: str) -> None:
        self.shown.append(line)


@contextmanager
def worker(**options: Any) -> Iterator[str]:
    """The address of a fake worker with these options (`fake_pair.main`)."""
    words = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in options.items()]
    command = [sys.executable, "-m", "tests.loadtest.fake_pair", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def asked(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path) as answer:
        return json.load(answer)


def bench(target: str, source: str) -> Bench:
    return Bench(Servers(Worker(target), Worker(source)), PlainPrompts())


def begun(path: Path, mu: float = 100.0, **settings: Any) -> RunFolder:
    """A run's folder in which mu of the large model is known, as `mu` would leave it."""
    served = Served(url="http://large", model="large", model_digest="large" * 8)
    run = Run(settings=Settings(**settings), machine=MACHINE, target=served)
    known = Saturation(system="large", tokens=run.settings.tokens, method="three_batches", repeats=[mu])
    folder = RunFolder(path)
    folder.save(run.with_saturation(known))
    return folder
