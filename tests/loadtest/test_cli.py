"""`kvlift loadtest` before fake workers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from loadtest.cli import _again, app
from loadtest.run import RunFolder
from loadtest.servers import Worker, this_machine
from tests.loadtest.conftest import ROOT
from tests.loadtest.pair import begun, worker

COMMAND = [sys.executable, "-m", "loadtest.cli"]


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str  # without its line breaks and frames


def kvlift_loadtest(*words: str) -> Done:
    """The command in this process: one of its own takes seconds to start."""
    done = CliRunner().invoke(app, list(words))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return Done(done.exit_code, done.stdout, " ".join(done.stderr.replace("│", " ").split()))


@pytest.fixture(scope="module")
def pair():
    with worker(name="large", service_s=0.002) as target, worker(name="small") as source:
        yield ["--target", target, "--source", source]


def test_mu_then_a_sweep_then_the_report_alone(pair, tmp_path):
    run = str(tmp_path / "run")
    systems = ["--systems", "large,lift-0.3"]
    assert kvlift_loadtest("mu", run, *pair, *systems, "--repeats", "1", "--batches", "1,4").returncode == 0
    points = ["--u", "0.5,0.9", "--seeds", "0,1", "--requests", "20", "--warm-up", "5"]
    swept = kvlift_loadtest("sweep", run, *pair, *systems, *points)
    assert swept.returncode == 0, swept.stderr
    assert "8 points to measure, 0 there already" in swept.stderr
    told = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(row["system"], row["u"], row["seeds"], row["requests"]) for row in told["rows"]] == [
        (system, u, 2, 30) for system in ("large", "lift-0.3") for u in (0.5, 0.9)
    ]
    assert told["missing"] == [] and len(RunFolder(tmp_path / "run").rows()) == 8 * 20
    before = {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()}
    again = kvlift_loadtest("report", run)
    assert again.returncode == 0 and "Native prefill and lift" in again.stdout
    assert {file.name: file.read_bytes() for file in (tmp_path / "run").iterdir()} == before
    assert "0 points to measure, 8 there already" in kvlift_loadtest("sweep", run, *pair, *systems, *points).stderr


def test_ctrl_c_keeps_what_was_measured_and_says_so(pair, tmp_path):
    """The first point ends, the second is stopped: its rows are kept, and the report tells what is missing."""
    folder = begun_here(tmp_path, pair)
    words = ["sweep", str(tmp_path), *pair, "--systems", "large", "--u", "20,0.02", "--seeds", "0", "--requests", "40"]
    words += ["--warm-up", "0"]
    with subprocess.Popen(
        [*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    ) as one:
        while not any(row.u == 0.02 for row in folder.rows()):
            assert one.poll() is None
            time.sleep(0.1)
        one.send_signal(signal.SIGINT)
        _, errors = one.communicate(timeout=60)
    assert one.returncode == 130
    assert "what was measured is kept" in " ".join(errors.split())
    rows = folder.rows()
    assert sum(row.u == 20 for row in rows) == 40 and 0 < sum(row.u == 0.02 for row in rows) < 40
    told = json.loads((tmp_path / "summary.json").read_text())
    assert told["missing"] == ["large, u = 0.02, seed 0"] and len(told["rows"]) == 1


def test_a_server_that_dies_in_mid_run(tmp_path):
    with worker(name="large", die_at=30) as target, worker(name="small") as source:
        pair = ["--target", target, "--source", source]
        folder = begun_here(tmp_path, pair)
        done = kvlift_loadtest(
            "sweep", str(tmp_path), *pair, "--systems", "large", "--u", "1", "--seeds", "0", "--requests", "100"
        )
    assert done.returncode == 1
    assert "requests in a row failed, the run ends here" in done.stderr
    assert sum(row.error is None for row in folder.rows()) > 20


def test_zero_successes(tmp_path):
    with worker(name="status-500") as target, worker(name="small") as source:
        pair = ["--target", target, "--source", source]
        begun_here(tmp_path, pair)
        done = kvlift_loadtest("sweep", str(tmp_path), *pair, "--systems", "large", "--u", "1", "--requests", "60")
    assert done.returncode == 1
    assert "none of 60 requests succeeded; the last one: /v1/chat/completions: HTTP 500: out of memory" in done.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["mu", "RUN", "--target", "http://127.0.0.1:9"], "no answer from http://127.0.0.1:9"),
        (["mu", "RUN", "--target", "nowhere"], "is this its address?"),
        (["sweep", "RUN", "--systems", "large,slow"], "no system 'slow'"),
        (["sweep", "RUN", "--systems", "large,large"], "names one twice"),
        (["sweep", "RUN", "--u", "0.5,0"], "expected numbers above 0"),
        (["sweep", "RUN", "--u", "inf"], "expected numbers above 0"),
        (["sweep", "RUN", "--seeds", "a"], "expected whole numbers"),
        (["sweep", "RUN", "--requests", "50", "--warm-up", "50"], "leaves none"),
        (["sweep", "RUN", "--source", "http://127.0.0.1:9"], "only together with --target"),
        (["mu", "RUN", "--batches", "1,64"], "batches of 1 to 32"),
        (["report", "RUN"], "expected the folder of a `kvlift loadtest` run"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, words, message):
    done = kvlift_loadtest(*[str(tmp_path / "none") if word == "RUN" else word for word in words])
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / "none").exists()


def test_a_sweep_without_mu_says_what_comes_first(pair, tmp_path):
    done = kvlift_loadtest("sweep", str(tmp_path), *pair, "--systems", "large")
    assert done.returncode == 1 and "first `kvlift loadtest mu`" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["mu", "run", "--repeats", "7", "--batches", "2,3"],
        ["sweep", "run", "--u", "0.5", "--seeds", "4", "--ttft-limit", "9.5"],
        ["all", "run", "--full"],
        ["all", "run"],
    ],
)
def test_the_same_command_runs_again_with_addresses(words):
    """What is handed on parses to what was given."""
    commands = typer.main.get_command(app).commands

    def parsed(given: list[str]):
        return commands[given[0]].make_context(given[0], given[1:])

    context = parsed(words)
    assert parsed(_again(context)).params == context.params


def begun_here(path: Path, pair: list[str]) -> RunFolder:
    """A run of these very workers on this machine, with a mu that none was measured for."""
    folder = begun(path)
    run = folder.load().model_copy(
        update={"machine": this_machine(), "target": Worker(pair[1]).served, "source": Worker(pair[3]).served}
    )
    folder.save(run)
    return folder
