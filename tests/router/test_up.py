"""`kvlift up`, with real processes: what it starts, it keeps; what it kept, it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import psutil
import pytest

from router.config import Config
from router.up import plan
from tests.router.conftest import MESSAGES
from tests.router.fake_worker import free_port, until

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


class Up:
    """A running `kvlift up` whose `worker` command is the fake one, brought by an entry point as the real one is."""

    def __init__(self, folder, model="fine"):
        info = folder / "kvlift-0.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlift\nVersion: 0.0\n")
        (info / "entry_points.txt").write_text("[kvlift.commands]\nworker = tests.router.fake_worker_cli:worker\n")
        self.pids_file = folder / "pids"
        self.port = free_port()
        tiers = "".join(
            f"  - {{name: {name}, served: served-{name}, start: {{model: {model}, "
            f"args: {{pids: '{self.pids_file}', max-total-tokens: 64, sleep-on-idle: true}}}}}}\n"
            for name in ("small", "large")
        )
        config = folder / "up.yaml"
        config.write_text(
            f"listen: {{port: {self.port}}}\ntiers:\n{tiers}policies: {{p: {{method: never}}}}\ndefault_policy: p\n"
            "health: {interval_s: 0.1}\nrestart: {attempts: 1, backoff_s: 0.1, stop_s: 1}\n"
        )
        env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "TMPDIR": str(folder)}
        command = [sys.executable, "-m", "router.cli", "up", "-c", str(config)]
        self.process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.PIPE, text=True)

    def lines(self):
        return self.pids_file.read_text().split("\n") if self.pids_file.exists() else []

    def pids(self):
        return [int(line) for line in self.lines() if line.isdigit()]

    def ready(self):
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/ready").status_code == 200
        except httpx.TransportError:
            return False

    def end(self, number=signal.SIGTERM):
        """Ends it and returns its exit code and what it said."""
        self.process.send_signal(number)
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


@pytest.fixture
def start(tmp_path):
    running = []

    def begin(**options):
        running.append(Up(tmp_path, **options))
        return running[0]

    yield begin
    for up in running:  # only after a failed test is there anything left
        up.process.kill()
        up.process.communicate()
        for pid in filter(alive, up.pids()):
            os.kill(pid, signal.SIGKILL)


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_serves_and_leaves_no_process_behind(start, number):
    up = start()
    until(up.ready, 60)
    answer = httpx.post(
        f"http://127.0.0.1:{up.port}/v1/chat/completions", json={"model": "large", "messages": MESSAGES}
    )
    assert answer.json()["model"] == "served-large"
    pids = up.pids()
    assert len(pids) == 8 and all(alive(pid) for pid in pids)
    assert up.lines().count("args --host 127.0.0.1 --max-total-tokens 64 --sleep-on-idle") == 2
    code, said = up.end(number)
    assert code == 0, said
    assert f"http://127.0.0.1:{up.port}/v1" in said
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_dies_is_restarted_and_its_orphans_are_ended(start):
    up = start()
    until(up.ready, 60)
    before = up.pids()
    os.kill(before[0], signal.SIGKILL)  # the launcher; its children survive it
    until(lambda: len(up.pids()) == 12, 60)
    assert not any(alive(pid) for pid in before[:4])
    assert all(alive(pid) for pid in before[4:])  # the other worker goes on
    until(up.ready, 60)
    pids = up.pids()
    code, said = up.end()
    assert code == 0 and "worker died" in said
    assert not any(alive(pid) for pid in pids)


def test_a_worker_that_cannot_be_kept_ends_up_with_the_reason(start):
    up = start(model="broken")
    said = up.process.communicate(timeout=60)[1]
    assert up.process.returncode == 1
    assert "restart.attempts" in said and "this worker is broken" in said


def test_each_replica_is_a_worker_with_a_port_and_a_log_of_its_own(tmp_path):
    starts = [{"start": {"model": "m", "args": {"base-gpu-id": gpu}}} for gpu in (0, 1)]
    config = Config.model_validate(
        {
            "tiers": [{"name": "a/b", "served": "s", "replicas": [*starts, {"address": "http://h:1"}]}],
            "policies": {"p": {"method": "never"}},
            "default_policy": "p",
        }
    )
    planned, specs = plan(config, tmp_path)
    addresses = [worker.address for worker in planned.tiers[0].workers()]
    assert len(set(addresses)) == 3 and addresses[2] == "http://h:1"
    assert [(spec.worker, spec.log_file.name) for spec in specs] == [("a/b#0", "a_b#0.log"), ("a/b#1", "a_b#1.log")]
    for gpu, spec in enumerate(specs):
        assert f"--port {addresses[gpu].rpartition(':')[2]}" in " ".join(spec.command)
        assert spec.command[-2:] == ["--base-gpu-id", str(gpu)]


def test_the_command_line_of_a_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("KEY", "secret")
    start = {"model": "m", "packs": ["p"], "args": {"a": 1, "b": True, "c": ["x", 2]}}
    config = Config.model_validate(
        {
            "tiers": [
                {"name": "small", "served": "s", "start": start, "api_key_env": "KEY"},
                {"name": "large", "served": "l", "address": "http://h:1"},
            ],
            "policies": {"p": {"method": "never"}},
            "default_policy": "p",
        }
    )
    planned, (spec,) = plan(config, tmp_path)
    assert planned.tiers[1].address == "http://h:1"
    port = planned.tiers[0].address.rpartition(":")[2]
    assert spec.command == [
        sys.executable,
        "-m",
        "router.cli",
        "worker",
        "--model",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        port,
        "--served-model-name",
        "s",
        "--pack",
        "p",
        "--api-key",
        "secret",
        "--a",
        "1",
        "--b",
        "--c",
        "x",
        "2",
    ]
