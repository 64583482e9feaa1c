"""What stands between the started servers and the load: its process, and how that ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.lineup import CALL_TIMEOUT_S
from loadtest.servers import Worker, this_machine
from loadtest.setup import pair_config, run_in_time, run_load
from loadtest.simulate import CAP
from tests.loadtest.pair import begun, worker


def test_the_pair_is_configured_as_the_paper_schedules():
    config = pair_config(Path("pair"), prompts=500, tokens=149)
    for tier in config.tiers:
        args = tier.start.args
        assert args["schedule-policy"] == "fcfs" and args["prefill-max-requests"] == CAP
        assert args["chunked-prefill-size"] == -1 and args["max-prefill-tokens"] > CAP * 149
        assert args["max-total-tokens"] > 500 * 149
    assert config.limits.first_token_s == config.lift.timeout_s == CALL_TIMEOUT_S
    assert config.restart.attempts == 0


def test_a_command_that_fails_fails_here(tmp_path):
    assert asyncio.run(run_load(["report", str(tmp_path)])) == 1


def test_the_loads_process_goes_before_the_servers_where_that_is_permitted(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        permitted = run_in_time(process.pid)
        assert permitted == (os.sched_getscheduler(process.pid) == os.SCHED_RR)

        def refused(*_: object) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "sched_setscheduler", refused)
        assert not run_in_time(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_load_whose_servers_are_stopped_keeps_its_rows(tmp_path):
    """Cancelling ends the process, but not before it has written what it has."""

    async def stopped_in_mid_load(words: list[str]) -> None:
        load = asyncio.create_task(run_load(words))
        while not folder.rows():
            assert not load.done()
            await asyncio.sleep(0.1)
        load.cancel()
        await load

    with worker(name="large") as target:
        served = Worker(target).served
        folder = begun(tmp_path)
        folder.save(folder.load().model_copy(update={"machine": this_machine(), "target": served}))
        words = ["sweep", str(tmp_path), "--target", target, "--systems", "large", "--u", "0.05", "--seeds", "0"]
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(stopped_in_mid_load(words))
    assert 0 < len(folder.rows()) < 500
    assert "not complete: 1 of 1 points are missing" in (tmp_path / "table.md").read_text()
