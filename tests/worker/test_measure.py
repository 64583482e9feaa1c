"""What is timed at start-up: runs of work that is ready to run."""

from __future__ import annotations

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
