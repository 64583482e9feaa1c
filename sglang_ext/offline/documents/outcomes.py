"""What one arm gave for one prompt with documents."""

from __future__ import annotations

from sglang_ext.offline.evaluate.store import OfItem


class LinkedOutcome(OfItem):
    """text: the greedy answer; agree, kl, tokens: agreeing tokens, summed KL (nats) and tokens of the full prefill's own
    answer, forced; length, computed: positions of the prompt, and those that the model ran online; missed: documents
    that are no slice of the prompt; ttft_ms: cache-hit time to the first token (appendix C); flops: flops.py.
    """

    text: str
    agree: int
    kl: float
    tokens: int
    length: int
    computed: int
    missed: int
    ttft_ms: float
    flops: int
