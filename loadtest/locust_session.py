"""One process of a locust run: which share it sends, when all begin, and when all have ended.

A run has four steps. When a test starts, the master gives each worker its share (number and of how many). A worker
makes its prompts and says that it is ready. When all are, the master names the moment at which offset 0 is. A worker
that has sent its share says so, with what went wrong. Without workers the one process does the same alone.
"""

from __future__ import annotations

import logging
import signal
import time
from pathlib import Path
from typing import Any

import gevent
from gevent.event import Event
from locust.runners import MasterRunner, WorkerRunner

from loadtest import locust_options as options
from loadtest.errors import CallFailed, LoadTestError
from loadtest.generator import GRACE_S, OpenLoop
from loadtest.rows import Row, RowWriter
from loadtest.schedule import share

log = logging.getLogger(__name__)

_LEAD_S = 0.5  # from naming the start to the start: the message travels meanwhile
_SHARE, _READY, _GO, _DONE = "kvlift_share", "kvlift_ready", "kvlift_go", "kvlift_done"
_ALONE = "alone"


class Session:
    """Made once per process, when locust has made its runner; lives through all runs started from the web page."""

    def __init__(self, environment: Any, runner: Any) -> None:
        self._environment = environment
        self._runner = runner
        self._loop: OpenLoop | None = None
        self._number, self._of = 0, 1  # this process's share
        self._start_unix = 0.0
        self._go = Event()
        self._expected: set[str] = set()  # the workers of the run, empty between runs
        self._ready: set[str] = set()
        self._done: set[str] = set()
        self._started = False  # the master has named the start
        self._stopping = False  # this process was asked to send no more
        # A user that is asked to stop gets time to end its run; locust's default is none.
        environment.stop_timeout = environment.stop_timeout or GRACE_S + 1
        environment.events.test_stop.add_listener(self._forget)
        if environment.parsed_options.headless and not isinstance(runner, WorkerRunner):
            gevent.signal_handler(signal.SIGTERM, runner.quit)  # locust's own comes only after a headless run
        if isinstance(runner, WorkerRunner):
            runner.register_message(_SHARE, self._take_share)
            runner.register_message(_GO, self._take_start)
        else:
            environment.events.test_start.add_listener(self._begin)
        if isinstance(runner, MasterRunner):
            runner.register_message(_READY, self._count_ready)
            runner.register_message(_DONE, self._count_done)

    def users(self) -> int | None:
        """How many users the run needs now, one per worker; None when all have ended."""
        if not self._expected:
            return len(self._alive()) if self._may_begin() else None
        lost = self._expected - self._alive() - self._done
        for worker in lost:
            self._finish(worker, f"worker {worker} went away in mid-run")
        return None if self._expected <= self._done else len(self._expected)

    def send_share(self) -> None:
        """The whole of this process's run; blocks. What goes wrong is told to the master, and ends in its log."""
        error = ""
        try:
            self._send()
        except LoadTestError as fault:
            error = str(fault)
        finally:
            self._tell(_DONE, error)

    def stop_share(self) -> None:
        """Sends no more."""
        self._stopping = True
        if self._loop is not None:
            self._loop.stop()
        self._go.set()

    def _send(self) -> None:
        chosen, host = self._environment.parsed_options, self._environment.host
        system = options.system(chosen, host)
        system.check()
        arrivals = share(options.arrivals(chosen), self._number, self._of)
        prompts = options.texts(chosen, arrivals)
        writer = RowWriter(Path(chosen.kvlift_rows)) if chosen.kvlift_rows else None

        def keep(row: Row) -> None:
            self._show(row)
            if writer is not None:
                writer.write(row)

        self._loop = OpenLoop(system, arrivals, prompts, options.tags(chosen), keep)
        try:
            self._tell(_READY, "")
            self._go.wait()
            if self._stopping:
                return
            # Processes share the time of day, not the monotonic clock.
            self._loop.run(time.perf_counter() + self._start_unix - time.time())
        finally:
            self._loop = None
            if writer is not None:
                writer.close()

    def _show(self, row: Row) -> None:
        failure = None if row.error is None else CallFailed(row.error)
        for name, seconds in (("ttft", row.ttft_s), ("total", row.total_s)):
            self._environment.events.request.fire(
                request_type=row.system,
                name=name,
                response_time=None if seconds is None else seconds * 1000,
                response_length=0,
                exception=failure,
                context={},
            )

    def _may_begin(self) -> bool:
        if not self._alive():
            self._fail(
                f"no worker is ready; after a run they need {self._environment.stop_timeout:g} s, start again then"
            )
            return False
        rows = self._environment.parsed_options.kvlift_rows
        if rows and Path(rows).exists():
            self._fail(f"{rows} exists; name another file, the rows of two runs are not mixed")
            return False
        return True

    def _begin(self, environment: Any, **_: Any) -> None:
        """A run starts: on the master, or in the only process."""
        self._expected, self._ready, self._done = self._alive(), set(), set()
        self._started = False
        for number, worker in enumerate(sorted(self._expected)):
            self._send_to(worker, _SHARE, {"number": number, "of": len(self._expected)})

    def _tell(self, message: str, error: str) -> None:
        if isinstance(self._runner, WorkerRunner):
            if message == _DONE:  # statistics that come after the master has ended the run are lost
                self._runner._send_stats()
            self._runner.send_message(message, {"error": error})
        elif message == _READY:
            self._start_unix = time.time()
            self._go.set()
        else:
            self._finish(_ALONE, error)

    def _send_to(self, worker: str, message: str, data: dict[str, Any]) -> None:
        if isinstance(self._runner, MasterRunner):
            self._runner.send_message(message, data, client_id=worker)

    def _take_share(self, environment: Any, msg: Any, **_: Any) -> None:
        self._number, self._of = msg.data["number"], msg.data["of"]

    def _take_start(self, environment: Any, msg: Any, **_: Any) -> None:
        self._start_unix = msg.data["start_unix"]
        self._go.set()

    def _count_ready(self, environment: Any, msg: Any, **_: Any) -> None:
        self._ready.add(msg.node_id)
        self._start_if_ready()

    def _count_done(self, environment: Any, msg: Any, **_: Any) -> None:
        self._finish(msg.node_id, msg.data["error"])
        self._start_if_ready()  # one that could not begin keeps no other waiting

    def _start_if_ready(self) -> None:
        if self._started or not self._expected <= self._ready | self._done:
            return
        self._started = True
        start = {"start_unix": time.time() + _LEAD_S}
        for worker in self._ready:
            self._send_to(worker, _GO, start)

    def _finish(self, worker: str, error: str) -> None:
        self._done.add(worker)
        if error:
            self._fail(error)

    def _fail(self, error: str) -> None:
        log.error("kvlift: %s", error)
        self._environment.process_exit_code = 1

    def _forget(self, environment: Any, **_: Any) -> None:
        self._go.clear()
        self._stopping = False
        self._expected, self._ready, self._done = set(), set(), set()

    def _alive(self) -> set[str]:
        if not isinstance(self._runner, MasterRunner):
            return {_ALONE}
        clients = self._runner.clients
        return {client.id for client in clients.ready + clients.spawning + clients.running}
