"""How much memory a set of process trees holds together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from router import processes

_LOOK_EVERY_S = 1.0


class PeakMemory:
    """The largest proportional set size seen, in GB (1e9 bytes): pages that processes share count once."""

    def __init__(self) -> None:
        self.peak_gb = 0.0

    @contextmanager
    def watching(self, pids: list[int]) -> Iterator[None]:
        """Looks at the trees of `pids`, and at this process, while the block runs."""
        over = threading.Event()
        watch = threading.Thread(target=self._watch, args=(pids, over), daemon=True)
        watch.start()
        try:
            yield
        finally:
            over.set()
            watch.join()

    def _watch(self, pids: list[int], over: threading.Event) -> None:
        while not over.wait(_LOOK_EVERY_S):
            everyone = [psutil.Process(), *(process for pid in pids for process in processes.tree(pid))]
            self.peak_gb = max(self.peak_gb, sum(map(_share, everyone)) / 1e9)


def _share(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.NoSuchProcess:
        return 0  # it ended while we looked: it holds nothing
