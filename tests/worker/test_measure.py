"""What is timed at start-up: runs of work that is ready to run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sglang_ext.worker import measure


@pytest.mark.parametrize(
    ("device", "runs_ms", "counted_ms"),
    [
        ("cuda", [9000.0, 3.0, 2.0], 2.0),  # the first one compiles kernels
        ("cuda", [9000.0, 800.0], 800.0),
        ("cpu", [7.0, 4.0], 4.0),
        ("cpu", [9000.0], 9000.0),  # nothing is compiled there: a long run is not repeated
    ],
)
def test_the_time_of_compiling_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, device: str, runs_ms: list[float], counted_ms: float
):
    left, clock = list(runs_ms), [0.0]

    def run() -> None:
        clock[0] += left.pop(0) / 1e3

    monkeypatch.setattr(measure.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    assert measure._least_ms(run, torch.device(device)) == pytest.approx(counted_ms)
    assert left == []


def test_workers_of_a_host_measure_one_after_the_other(tmp_path: Path):
    seen: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with measure.alone(tmp_path / "lock"):
            seen.append("other")
            inside.set()
            leave.wait(20)
            seen.append("other is done")

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(20)
    threading.Timer(0.2, leave.set).start()
    with measure.alone(tmp_path / "lock"):
        seen.append("this one")
    thread.join(20)
    assert seen == ["other", "other is done", "this one"]


def test_a_worker_that_never_ends_its_measurement_is_not_waited_for(tmp_path: Path):
    with measure.alone(tmp_path / "lock"), measure.alone(tmp_path / "lock", wait_s=0.1):
        pass


def test_of_several_rounds_the_quickest_counts():
    assert measure._quicker((16, 136, 290.0), (16, 136, 110.0)) == (16, 136, 110.0)
    assert measure._quicker((16, 136, 90.0), (16, 136, 110.0)) == (16, 136, 90.0)
