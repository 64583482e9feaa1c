"""The open loop, against a server in another process whose queue is known."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from itertools import pairwise
from statistics import correlation, fmean, pstdev
from types import SimpleNamespace

import gevent
import pytest
from gevent.event import Event

from loadtest import schedule
from loadtest.client import Answer
from loadtest.errors import NothingSucceeded, TargetDown
from loadtest.rows import Row, lag_fault, quantile, read_rows
from loadtest.schedule import Arrival
from tests.loadtest.conftest import ROOT, loop, measure


class Busy:
    """Answers at once, and holds the whole process for `seconds` per request, as slow sending would."""

    name = "busy"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def check(self) -> None:
        pass

    def send(self, arrival: Arrival, prompt: str) -> Answer:
        time.sleep(self._seconds)
        now = time.perf_counter()
        return Answer(now, now)


def test_500_arrivals_a_second_are_all_sent_in_order(start):
    server = start()
    arrivals = schedule.poisson(500.0, 1000, 0)
    rows = measure(server.url, arrivals)
    assert [row.index for row in rows] == list(range(1000))
    assert all(a.sent_s <= b.sent_s for a, b in pairwise(rows))
    assert [row.scheduled_s for row in rows] == [a.offset_s for a in arrivals]
    assert all(row.error is None and row.lag_s >= 0 for row in rows)
    assert sorted(map(int, server.stats()["prompts"])) == list(range(1000))


def test_sending_does_not_wait_for_answers(start):
    """A closed loop would send the second request after the first answer."""
    server = start(service_s=0.3)
    rows = measure(server.url, schedule.constant(100.0, 6))
    assert all(row.sent_s < rows[0].first_token_s for row in rows)
    assert rows[-1].ttft_s > rows[0].ttft_s  # it queued


def test_case_l1_late_timers_and_slow_sends_do_not_add_up(monkeypatch):
    """On a clock of its own: every sleep is 1 ms too long and every send takes 3 ms. Sleeping the gaps would drift."""
    now, late_s, send_s = [0.0], 0.001, 0.003

    class LateTimer(Event):
        def wait(self, timeout=None):
            until = now[0] + timeout + late_s
            gevent.sleep(0)  # the others run meanwhile
            now[0] = max(now[0], until)

    class Slow(Busy):
        def send(self, arrival, prompt):
            now[0] += send_s
            return Answer(now[0], now[0])

    monkeypatch.setattr("loadtest.generator.Event", LateTimer)
    monkeypatch.setattr("loadtest.generator.time", SimpleNamespace(perf_counter=lambda: now[0]))
    rows = measure("", schedule.poisson(100.0, 500, 0), system=Slow(0))
    assert len(rows) == 500
    tight = [row for before, row in pairwise(rows) if row.scheduled_s - before.sent_s > late_s + send_s]
    assert len(tight) > 200  # those whose predecessor was out of the way
    assert all(0 <= row.lag_s < 2 * late_s + send_s for row in tight)


def test_case_l2_a_stalled_client_makes_the_run_invalid():
    rows = measure("", schedule.constant(100.0, 50), system=Busy(0.02))
    assert lag_fault(rows) is not None


def test_case_l4_connections_are_kept(start):
    server = start()
    measure(server.url, schedule.constant(100.0, 100))
    assert server.stats()["connections"] < 20  # of 100 requests; a few overlap


def lindley(arrivals: list[Arrival], service_s: float) -> list[float]:
    """Each arrival's wait before one server with a constant service time."""
    waits, free = [], 0.0
    for arrival in arrivals:
        waits.append(max(free - arrival.offset_s, 0.0))
        free = arrival.offset_s + waits[-1] + service_s
    return waits


SERVICE_S, LOAD, SENT = 0.03, 0.7, 200
THEORY_S = LOAD * SERVICE_S / (2 * (1 - LOAD))  # the mean wait of an M/D/1 queue (Pollaczek and Khinchine)


def md1_trace(count: int, seed: int) -> list[Arrival]:
    return schedule.poisson(LOAD / SERVICE_S, count, seed)


def test_the_recursion_gives_the_theory():
    blocks = [fmean(lindley(md1_trace(5_000, seed), SERVICE_S)) for seed in range(60)]
    assert abs(fmean(blocks) - THEORY_S) < 4 * pstdev(blocks) / math.sqrt(60)


def test_case_l7_the_measured_mean_wait_is_that_of_md1(start):
    error = pstdev(fmean(lindley(md1_trace(SENT, seed), SERVICE_S)) for seed in range(1, 201))
    arrivals = md1_trace(SENT, 0)
    rows = measure(start(service_s=SERVICE_S).url, arrivals)
    ttft = [row.ttft_s for row in rows]
    waited = fmean(ttft) - min(ttft)  # whoever met an empty server waited for nothing
    assert abs(waited - THEORY_S) < 2 * error
    # The same trace, reckoned: what is left is what HTTP and the machine add, and each request has its own wait.
    reckoned = lindley(arrivals, SERVICE_S)
    assert abs(waited - fmean(reckoned)) < error
    assert correlation(ttft, reckoned) > 0.7


def test_case_l7_a_freeze_of_two_seconds_shows_in_p99(start):
    arrivals = schedule.poisson(60.0, 130, 3)
    frozen, plain = (
        quantile([row.ttft_s for row in measure(server.url, arrivals)], 0.99)
        for server in (start(freeze_at=60, freeze_s=2.0), start())
    )
    assert frozen - plain > 2.0 / 2


def test_failures_are_rows_without_times(start):
    rows: list[Row] = []
    with pytest.raises(NothingSucceeded, match=r"none of 20 requests .*out of memory"):
        loop(start().url, schedule.constant(200.0, 20), rows, model="status-500").run()
    assert sorted(row.index for row in rows) == list(range(20))
    assert all("HTTP 500" in row.error and row.ttft_s is None for row in rows)


def test_a_server_that_dies_in_mid_run_ends_it_and_keeps_the_rows(start):
    rows: list[Row] = []
    running = loop(start(die_at=30).url, schedule.constant(100.0, 2000), rows, give_up_after=5)
    with pytest.raises(TargetDown, match=r"5 requests in a row failed.*no connection to http"):
        running.run()
    assert sum(row.error is None for row in rows) in range(20, 30)
    assert len(rows) < 200
    assert sorted(row.index for row in rows) == list(range(len(rows)))  # no gap: each one sent has its row


def test_a_server_that_is_not_there_is_known_before_anything_is_sent():
    rows: list[Row] = []
    with pytest.raises(TargetDown, match="is the server running"):
        loop("http://127.0.0.1:9", schedule.constant(1.0, 50), rows).run()
    assert rows == []


def test_a_fault_of_a_system_is_not_swallowed():
    class Broken(Busy):
        def send(self, arrival, prompt):
            raise ZeroDivisionError("a bug")

    with pytest.raises(ZeroDivisionError, match="a bug"):
        loop("", schedule.constant(100.0, 500), [], system=Broken(0)).run()


def test_stop_ends_the_dispatch_and_gives_what_is_in_flight_its_row(standing):
    rows: list[Row] = []
    running = loop(standing.url, schedule.constant(50.0, 1000), rows, model="stall", grace_s=0.2)
    gevent.spawn_later(0.5, running.stop)
    tally = running.run()
    assert tally.stopped and tally.planned == 1000 and 0 < tally.sent < 1000
    assert sorted(row.index for row in rows) == list(range(tally.sent))
    assert {row.error for row in rows} == {"stopped before the answer was whole"}


CHILD = """
import json, sys
from pathlib import Path
from loadtest import schedule
from loadtest.client import Client
from loadtest.generator import OpenLoop, Tags, stopping_on_signals
from loadtest.rows import RowWriter
from loadtest.systems import Chat

arrivals = schedule.constant(50.0, 5000)
with RowWriter(Path(sys.argv[2])) as rows:
    system = Chat("fake", Client(sys.argv[1]), "plain")
    run = OpenLoop(system, arrivals, {a.index: f"{a.index} x" for a in arrivals}, Tags(0), rows.write)
    with stopping_on_signals(run.stop):
        tally = run.run()
print(json.dumps([tally.sent, tally.stopped]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_what_was_measured(standing, tmp_path, number):
    file = tmp_path / "rows.jsonl"
    command = [sys.executable, "-c", CHILD, standing.url, str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        until(lambda: file.exists() and file.read_text().count("\n") >= 20)
        child.send_signal(number)
        told, _ = child.communicate(timeout=90)
    sent, stopped = json.loads(told)
    assert stopped and child.returncode == 0
    assert sorted(row.index for row in read_rows(file)) == list(range(sent))
    assert 20 <= sent < 5000


def until(condition, seconds: float = 90.0) -> None:
    """Waits for a condition, or fails the test."""
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("the condition did not come true")
