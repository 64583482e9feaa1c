"""Keeps worker processes running: starts them, restarts those that die, stops all of them."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from router import processes
from router.config import Restart
from router.errors import SuperviseError

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2
_LONGEST_PAUSE_S = 30.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Spec:
    """One worker to run. `command` may hold the worker's key: it is never logged."""

    worker: str
    command: list[str]
    log_file: Path


class _Child:
    """One worker's process, over its restarts."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.restarts = 0
        self.start_at = time.monotonic()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    @property
    def runs(self) -> bool:
        return self._process is not None

    def start(self) -> None:
        try:
            self._process = processes.start(self.spec.command, self.spec.log_file)
        except OSError as error:
            raise SuperviseError(
                f"worker {self.spec.worker!r}: cannot start {self.spec.command[0]}: {error}"
            ) from error
        log.info("worker started: worker=%s pid=%d log=%s", self.spec.worker, self._process.pid, self.spec.log_file)

    def exit_code(self) -> int | None:
        """How the process ended, None while it runs."""
        return self._process.poll() if self._process else None

    def forget(self) -> None:
        self._process = None


class Supervisor:
    """Runs a set of workers. `run` ends only by an error or by cancellation; `stop` always follows it.

    Making one makes this process adopt the orphans among its descendants.
    """

    def __init__(self, specs: list[Spec], restart: Restart) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._restart = restart
        processes.adopt_orphans()

    def states(self) -> dict[str, str]:
        """One line per worker, for people."""
        return {child.spec.worker: _state(child) for child in self._children}

    def pids(self) -> list[int]:
        """The process that leads each worker's tree, of those that run now."""
        return [child.pid for child in self._children if child.pid]

    async def run(self) -> None:
        """Raises `SuperviseError` when a worker has died more often than it may be restarted."""
        while True:
            for child in self._children:
                if child.runs:
                    await self._look_at(child)
                elif time.monotonic() >= child.start_at:
                    child.start()
            await asyncio.sleep(_LOOK_EVERY_S)

    def stop(self) -> None:
        """Ends every worker, its descendants, and what they left behind. Blocks for `stop_s` and the time to kill."""
        ending = [process for child in self._children if child.pid for process in processes.tree(child.pid)]
        processes.end(ending + processes.orphans({p.pid for p in ending}), self._restart.stop_s)
        processes.end(processes.orphans(set()), 0)  # born or orphaned while the others ended
        for child in self._children:
            child.exit_code()
            child.forget()

    async def _look_at(self, child: _Child) -> None:
        code = child.exit_code()
        if code is None:
            return
        child.forget()
        leaders = {other.pid for other in self._children if other.pid}
        # What a launcher leaves behind still holds its port and memory: it goes before the next one comes.
        await asyncio.to_thread(processes.end, processes.orphans(leaders), self._restart.stop_s)
        if child.restarts >= self._restart.attempts:
            raise SuperviseError(
                f"worker {child.spec.worker!r}: ended with code {code} after {child.restarts} restarts "
                f"(restart.attempts); the end of {child.spec.log_file}:\n{_tail(child.spec.log_file)}"
            )
        pause = min(self._restart.backoff_s * 2**child.restarts, _LONGEST_PAUSE_S)
        child.restarts += 1
        child.start_at = time.monotonic() + pause
        log.warning("worker died: worker=%s code=%d restart=%d in=%gs", child.spec.worker, code, child.restarts, pause)


def _state(child: _Child) -> str:
    again = f", restarted {child.restarts} times" if child.restarts else ""
    return (f"pid {child.pid}" if child.runs else "waiting to restart") + again


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
