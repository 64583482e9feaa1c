"""What a worker has done since it started: GET /kv/counters. Who measures takes differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX


@dataclass
class SchedulerCounters:
    """Counted in the scheduler.

    prefill_batches, prefill_requests: SGLang's own extend batches and the requests in them; a prompt in two
    chunks counts twice, a health check not at all. lift_batches: forwards that recompute lifted positions.
    exported_bytes: of the blocks that other workers asked for. document_batches: forwards that compile documents or
    compute what stands between them; compiled_positions, inline_positions: of the ones and of the others. tails_used:
    requests whose first token took no forward of SGLang's, since a job's had run their last tokens.
    """

    prefill_batches: int = 0
    prefill_requests: int = 0
    lift_batches: int = 0
    recomputed_positions: int = 0
    exported_bytes: int = 0
    document_batches: int = 0
    compiled_positions: int = 0
    inline_positions: int = 0
    prompts_linked: int = 0
    tails_used: int = 0

    def count_batch(self, batch: Any) -> None:
        """Takes note of a batch (SGLang's ScheduleBatch) that is about to run."""
        if not batch.forward_mode.is_extend():
            return
        requests = sum(not str(request.rid).startswith(HEALTH_CHECK_RID_PREFIX) for request in batch.reqs)
        self.prefill_batches += requests > 0
        self.prefill_requests += requests


@dataclass
class LiftCounters:
    """How /kv/lift ended, counted where it is answered.

    lifts: applied; lifts_declined: a native prefill was expected to be faster; lifts_failed: all others,
    given up by their client or not.
    """

    lifts: int = 0
    lifts_declined: int = 0
    lifts_failed: int = 0


@dataclass
class DocumentCounters:
    """What became of the documents in chat requests, counted where they are looked up; each counts once per request.

    document_hits: their KV was here or stored; documents_compiled: on first sight, or again; documents_missed: their
    tokens are no slice of the prompt's, or they were not compiled.
    """

    document_hits: int = 0
    documents_compiled: int = 0
    documents_missed: int = 0
