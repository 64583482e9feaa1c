"""The clock's rows: one per length, both sides counted and timed on the same tokens."""

from __future__ import annotations

from sglang_ext.offline.documents.timing import Clock, measure
from sglang_ext.offline.evaluate.run import Model
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import executor


def test_each_length_has_its_row_and_documents_save_operations():
    ticks: list = []
    clock = Clock(documents=2, lengths=(20, 60), inline=20, rounds=2)
    short, long = measure(clock, Model("m", executor("qwen3")), lambda: ticks.append(1))
    assert len(ticks) == 4
    assert (short.tokens, long.tokens, short.rounds) == (20, 60, 2)
    # What grows with the documents is what the full prefill computes.
    assert long.full_flops > 2 * short.full_flops
    assert long.linked_flops < 1.5 * short.linked_flops < short.full_flops
    assert min(short.full_ms, short.linked_ms, short.ratio) > 0
