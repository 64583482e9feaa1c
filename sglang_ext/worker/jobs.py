"""Prompts whose KV is partly filled and partly computed, outside SGLang's own batches: a batch of them per step.

A job is queued, opened (its slots taken, its fills prepared), computed over one or more scheduler steps, and finished.
Between its steps it keeps its slots and the lock on what it builds upon, and nothing of it is in the tree. What a job
is for, a lift, a link or a compilation, its opener knows.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from itertools import groupby
from typing import Any, Mapping, Protocol, Sequence

from sglang_ext.phases import Phases
from sglang_ext.worker.answers import Answer, explain
from sglang_ext.worker.executor import SGLangExecutor, Work
from sglang_ext.worker.opened import OpenJob
from sglang_ext.worker.pool import Pool


class Opener(Protocol):
    """Makes jobs of the requests of one type, and answers of the jobs."""

    def open(self, request: Any) -> OpenJob | Answer:
        """The job; the answer itself where nothing is left to compute, or nothing will be. May raise."""

    def finish(self, job: Any) -> Answer:
        """The answer of a job that is computed. Its slots are the opener's to hand on, or to free where it raises."""

    def drop(self, request: Any) -> None:
        """Frees what a request holds that was not opened."""

    def failed(self, reason: str) -> Answer:
        """The answer where anything went wrong."""

    def count(self, positions: int, forwards: int) -> None:
        """Takes note of positions that were computed for its jobs, and in how many forwards."""


class Jobs:
    """Runs jobs on one scheduler's pool, first come first served."""

    def __init__(
        self, pool: Pool, executor: SGLangExecutor, openers: Mapping[type, Opener], most_at_once: int | None
    ) -> None:
        """openers: by type of request; most_at_once: jobs in one batch, None for any number."""
        self._pool = pool
        self._executor = executor
        self._openers = openers
        self._most_at_once = most_at_once
        self._queued: deque[Any] = deque()
        self._open: list[OpenJob] = []

    @property
    def busy(self) -> bool:
        return bool(self._queued or self._open)

    @property
    def held_slots(self) -> int:
        """Slots of open jobs: neither free nor in the tree."""
        return sum(len(job.fresh) for job in self._open)

    def queue(self, request: Any) -> None:
        self._queued.append(request)

    def drop(self, rid: str) -> None:
        """Gives up the queued or open job of this request, if there is one."""
        for request in [request for request in self._queued if request.rid == rid]:
            self._queued.remove(request)
            self._opener(request).drop(request)
        for job in [job for job in self._open if job.request.rid == rid]:
            self._close(job)

    def drop_all(self) -> list[Any]:
        """Gives up everything; returns the requests, which are still to be answered."""
        dropped = [*(job.request for job in self._open), *self._queued]
        for request in dropped:
            self.drop(request.rid)
        return dropped

    def refusal(self, request: Any, reason: str) -> Answer:
        """The answer to a request that was given up."""
        return self._opener(request).failed(reason)

    def advance(self, most_positions: int | None) -> list[tuple[Any, Answer]]:
        """Takes one batch of jobs on; returns the requests that are done, with their answers.

        most_positions: compute so many and leave the rest for the next call; None sets no limit but that of the batch.
        A job that fails gives its slots back and answers with the reason; the others go on.
        """
        ended: list[tuple[Any, Answer]] = []
        works: list[tuple[OpenJob, Work | None]] = []
        room = most_positions
        # Those that are open come first: they hold slots.
        waiting = iter(list(self._open))
        while room != 0 and len(works) != self._most_at_once:
            job = next(waiting, None)
            if job is None:
                if not self._queued:
                    break
                request = self._queued.popleft()
                opened = self._try_open(request)
                if not isinstance(opened, OpenJob):
                    ended.append((request, opened))
                    continue
                job = opened
                self._open.append(job)
            work = job.take(len(job.chosen) if room is None else room)
            works.append((job, work))
            if work is not None:
                room = None if room is None else room - len(work.positions)
        # Only jobs that want the same weights can share a forward.
        for _, sharing in groupby(sorted(works, key=_weights), key=_weights):
            together = list(sharing)
            reason = self._compute(together)
            for job, _ in together:
                if reason is not None:
                    self._close(job)
                    ended.append((job.request, self._opener(job.request).failed(reason)))
                elif job.done == len(job.chosen):
                    ended.append((job.request, self._finish(job)))
        return ended

    def _try_open(self, request: Any) -> OpenJob | Answer:
        opener = self._opener(request)
        try:
            return opener.open(request)
        except Exception as error:
            return opener.failed(explain(error))

    def _compute(self, together: Sequence[tuple[OpenJob, Work | None]]) -> str | None:
        """Runs the works as one batch. Returns the reason where it failed."""
        working = [(job, work) for job, work in together if work is not None]
        if not working:
            return None
        jobs = [job for job, _ in together]
        batch, filled = Phases(), _phases_ms(jobs)
        try:
            with batch("compute"), jobs[0].writing() if jobs[0].writing is not None else nullcontext():
                forwards, logits = self._executor.compute([work for _, work in working])
        except Exception as error:
            return explain(error)
        for (job, _), last in zip(working, logits, strict=True):
            job.logits = last
        filled = _phases_ms(jobs) - filled  # inside the forward, where it did not wait for the fills
        for job in jobs:
            job.phases.ms[job.phase] = job.phases.ms.get(job.phase, 0.0) + batch.ms["compute"] - filled
        for opener in {id(self._opener(job.request)): self._opener(job.request) for job in jobs}.values():
            ours = (work for job, work in working if self._opener(job.request) is opener)
            positions = sum(len(work.positions) for work in ours)
            opener.count(positions, forwards if positions else 0)
        return None

    def _finish(self, job: OpenJob) -> Answer:
        self._open.remove(job)
        opener = self._opener(job.request)
        with job.keep:
            try:
                return opener.finish(job)
            except Exception as error:
                return opener.failed(explain(error))

    def _close(self, job: OpenJob) -> None:
        """Gives up an open job: its slots and its locks."""
        self._open.remove(job)
        with job.keep:
            self._pool.free(job.fresh)

    def _opener(self, request: Any) -> Opener:
        return self._openers[type(request)]


def _weights(entry: tuple[OpenJob, Work | None]) -> int:
    """Equal for jobs that the same weights compute."""
    return id(entry[0].writing)


def _phases_ms(jobs: Sequence[OpenJob]) -> float:
    return sum(sum(job.phases.ms.values()) for job in jobs)
