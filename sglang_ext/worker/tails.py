"""The end of a prompt that a job computed together with the prefix that it published.

SGLang's tree never serves a prompt whole: the request that follows a job still has to run its last tokens, at least one.
The job's own forward has run them already, so that this batch's outcome is known. Where every request of a batch is such
a one, the model is not run: the KV goes to the slots that SGLang gave them, and the logits to its sampler, so that
sampling, grammars, log-probabilities and streaming are untouched. A lone lift reads the weights once instead of twice.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Any, Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunnerOutput

from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.leases import Asked, Leases
from sglang_ext.worker.ops import Buffers
from sglang_ext.worker.pool import Pool


@dataclass(frozen=True, eq=False)
class Tail:
    """ids: all tokens of the prompt; start: where its published prefix ends and this begins; kv: by layer, keys (rotated)
    and values [n - start, kv_heads, head_dim], as they lie in a pool; logits: [vocabulary], of the last token.
    """

    ids: array[int]
    start: int
    kv: Sequence[Buffers]
    logits: torch.Tensor

    def continues(self, ids: array[int], prefix: int) -> bool:
        """Whether this is what is left to compute of a prompt `ids` whose first `prefix` tokens are cached."""
        return prefix == self.start and ids == self.ids


class Tails:
    """Knows the outcome of SGLang's batches that are made of tails alone. Ask it of each batch before it runs."""

    def __init__(self, pool: Pool, leases: Leases[Tail], counters: SchedulerCounters) -> None:
        self._pool = pool
        self._leases = leases
        self._counters = counters
        self._expected: tuple[list[str], list[Tail]] | None = None  # of the next batch: its requests, and their tails

    def expect(self, batch: Any) -> None:
        """Looks a batch (SGLang's ScheduleBatch) up that is about to run."""
        self._expected = None
        if batch.forward_mode != ForwardMode.EXTEND or not len(self._leases):
            return
        found = [self._of(request, prefix) for request, prefix in zip(batch.reqs, batch.prefix_lens, strict=True)]
        known = [tail for tail in found if tail is not None]
        if len(known) == len(found):
            self._expected = [request.rid for request in batch.reqs], known

    def outcome(self, batch: ForwardBatch) -> ModelRunnerOutput | None:
        """What the forward of the batch that was expected gives; None where the model has to run.

        Writes the KV to the batch's slots.
        """
        expected, self._expected = self._expected, None
        if expected is None or batch.capture_hidden_mode.need_capture() or _input_logprobs(batch):
            return None
        rids, tails = expected
        if batch.rids != rids:
            return None
        self._pool.write(batch.out_cache_loc, [tail.kv for tail in tails])
        self._counters.tails_used += len(tails)
        logits = torch.stack([tail.logits for tail in tails])  # the sampler works in place
        return ModelRunnerOutput(LogitsProcessorOutput(next_token_logits=logits), can_run_graph=False)

    def _of(self, request: Any, prefix: int) -> Tail | None:
        asked = Asked(request.extra_key, request.get_fill_ids())
        return next((tail for tail in self._leases.kept_for(asked) if tail.continues(asked.ids, prefix)), None)


def _input_logprobs(batch: ForwardBatch) -> bool:
    """Whether log-probabilities of the prompt's own tokens are wanted, which nobody has computed."""
    if not batch.return_logprob:
        return False
    wanted = zip(batch.extend_logprob_start_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
    return any(first < count for first, count in wanted)
