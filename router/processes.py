"""Child processes that leave nothing behind.

A worker is a tree: SGLang's launcher starts a scheduler, a detokenizer and more. Each worker gets a session of its
own, and this process is made the one that inherits orphans (Linux), so that whatever a dead launcher leaves can
still be found, stopped and reaped.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

_KILL_S = 5.0  # a killed process is gone as soon as the kernel has freed what it held
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process, for its whole life. Linux; elsewhere nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def start(command: list[str], log_file: Path) -> subprocess.Popen[bytes]:
    """Starts a command in a new session, its output appended to `log_file`. Raises `OSError`."""
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent(),
        )


def tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that exist now."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def orphans(leaders: set[int]) -> list[psutil.Process]:
    """What this process inherited: its children that are none of `leaders`, with their descendants."""
    return [p for child in psutil.Process().children() if child.pid not in leaders for p in tree(child.pid)]


def end(processes: list[psutil.Process], grace_s: float) -> None:
    """Asks processes to stop, kills those that have not within `grace_s` seconds, and reaps them. Blocks."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        log.warning("killing pid=%d: still there %g s after SIGTERM", process.pid, grace_s)
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=_KILL_S)


def _signal(process: psutil.Process, number: int) -> None:
    with suppress(psutil.NoSuchProcess):  # it ended by itself, which is what was wanted
        process.send_signal(number)


def _die_with_parent() -> Callable[[], None] | None:
    """For the child, before it becomes the command: SIGTERM when this process is killed. Linux; elsewhere None."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def ask_kernel() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:  # it died in between
            os._exit(1)

    return ask_kernel
