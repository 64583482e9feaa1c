"""A worker of its own for the length of a bench."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from sglang_ext.errors import WorkerError

_START_S = 600.0
_END_S = 10.0


@contextmanager
def worker_of(model: Path, log: Path, tokens: int) -> Iterator[str]:
    """The address of a worker that serves `model` inside the block. tokens: slots of its KV pool.

    Raises WorkerError where it does not come up; its output goes to `log`.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    kvlift = Path(sys.executable).with_name("kvlift")  # the command of this very installation
    command = [str(kvlift), "worker", "--model", str(model), "--port", str(port), "--max-total-tokens", str(tokens)]
    command += ["--workers-on-host", "1"]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        _await(url, child, log)
        yield url
    finally:
        _end(child)


def _await(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise WorkerError(f"the worker ended at its start; see {log}")
        with suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise WorkerError(f"the worker was not ready within {_START_S:.0f} s; see {log}")


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the worker's whole session: SGLang's processes do not all follow their first one."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
