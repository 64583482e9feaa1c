"""Whose turn it is in the scheduler: the jobs', or the requests' for which the last jobs were."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterator

from sglang_ext.worker.leases import Leases

PATIENCE = 0.25
"""For how much of the last batch of jobs' duration the next one waits."""


class Turns:
    """Jobs wait for the requests of the jobs before them, so that these do not wait for the jobs behind.

    A lifted request comes back over HTTP a few milliseconds after its lift was answered. Where others queue, the next
    batch of jobs would have begun by then, and the request would wait for strangers' lifts after its own. The wait is
    bounded by what the last batch took, so that a client that never comes back costs a share of one batch; after it at
    least one batch of jobs runs.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._patience_s = 0.0

    @property
    def jobs_may_run(self) -> bool:
        return not self._leases.younger(self._patience_s)

    @contextmanager
    def of_jobs(self) -> Iterator[None]:
        """Around a batch of jobs, whose requests come next."""
        started = time.monotonic()
        try:
            yield
        finally:
            self._patience_s = PATIENCE * (time.monotonic() - started)
