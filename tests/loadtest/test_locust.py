"""The locustfile under locust itself, as a process."""

from __future__ import annotations

import csv
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest import schedule
from loadtest.rows import read_rows
from tests.loadtest.conftest import ROOT
from tests.loadtest.test_generator import until


def start_locust(url: str, *words: str, **options: Any) -> subprocess.Popen[str]:
    named = [f"--kvlift-{name.replace('_', '-')}={value}" for name, value in options.items()]
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    return subprocess.Popen(
        [*command, "--host", url, *words, *named],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def locust(url: str, *words: str, **options: Any) -> tuple[int, str]:
    """Exit code and what it said."""
    with start_locust(url, *words, **options) as process:
        said, _ = process.communicate(timeout=120)
    return process.returncode, said


def test_locusts_own_csv_shows_ttft_of_every_arrival(start, tmp_path):
    server, rows = start(), tmp_path / "rows.jsonl"
    code, said = locust(
        server.url, "--csv", str(tmp_path / "run"), schedule="gamma", rate=100, count=60, seed=4, rows=rows
    )
    assert code == 0, said
    with (tmp_path / "run_stats.csv").open() as file:
        table = {line["Name"]: line for line in csv.DictReader(file)}
    for name in ("ttft", "total"):
        assert (table[name]["Request Count"], table[name]["Failure Count"]) == ("60", "0")
    found = sorted(read_rows(rows), key=lambda row: row.index)
    assert [row.scheduled_s for row in found] == [a.offset_s for a in schedule.gamma(100.0, 60, 4, cv=2.0)]
    average = sum(row.ttft_s for row in found) / 60 * 1000
    assert float(table["ttft"]["Average Response Time"]) == pytest.approx(average, rel=1e-6)
    assert len(set(server.stats()["prompts"])) == 60


def test_workers_share_one_trace(start, tmp_path):
    server, rows, trace = start(keep=True), tmp_path / "rows.jsonl", tmp_path / "trace.csv"
    trace.write_text("".join(f"{i / 10},{20 + i},{1 + i % 5}\n" for i in range(31)))
    code, said = locust(server.url, "--processes", "2", schedule="trace", trace=trace, scale=2, count=0, rows=rows)
    assert code == 0, said
    found = sorted(read_rows(rows), key=lambda row: row.index)
    assert [row.index for row in found] == list(range(31))
    assert [row.scheduled_s for row in found] == pytest.approx([i / 20 for i in range(31)])
    assert all(row.error is None and row.rate is None for row in found)
    bodies = [body for _, body in server.stats()["asked"]]
    lengths = {(len(body["messages"][0]["content"].split()), body["max_tokens"]) for body in bodies}
    assert lengths == {(20 + i, 1 + i % 5) for i in range(31)}
    # Both clocks begin together: the server saw the shares interleaved.
    order = [int(prompt.split(".")[1]) % 2 for prompt in server.stats()["prompts"]]
    assert sum(a != b for a, b in pairwise(order)) > 15


@pytest.mark.parametrize(
    ("url", "options", "word"),
    [
        ("http://127.0.0.1:9", {}, "no connection to http://127.0.0.1:9.*is the server running"),
        ("", {"rate": 100, "count": 10, "model": "status-500"}, "none of 10 requests succeeded.*out of memory"),
        ("", {"schedule": "trace", "trace": "no-such.csv"}, r"no-such\.csv"),
    ],
    ids=["wrong host", "zero successes", "no trace"],
)
def test_what_cannot_work_is_a_clear_message_and_an_exit_code(standing, url, options, word):
    code, said = locust(url or standing.url, **options)
    assert code == 1
    assert re.search(f"ERROR.*kvlift: .*{word}", said), said
    assert "Traceback" not in said


def test_the_rows_of_two_runs_are_not_mixed(standing, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("the first run's\n")
    code, said = locust(standing.url, rate=100, count=10, rows=rows)
    assert code == 1 and "not mixed" in said
    assert rows.read_text() == "the first run's\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(standing, tmp_path, number):
    rows = tmp_path / "rows.jsonl"
    with start_locust(standing.url, rate=50, count=5000, rows=rows) as process:
        until(lambda: rows.exists() and rows.read_text().count("\n") >= 20)
        process.send_signal(number)
        said, _ = process.communicate(timeout=120)
    found = sorted(row.index for row in read_rows(Path(rows)))
    assert found == list(range(len(found))) and 20 <= len(found) < 5000, said
    assert process.returncode == 0, said
