"""Fills inside a forward: each layer's entries are there when the forward comes to it, and not before."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sglang_ext.worker.ahead import LayersAhead

LAYERS = 5


def test_on_a_cpu_each_layer_is_filled_when_its_turn_comes():
    written: list[tuple[str, int]] = []

    def fill(name: str) -> Iterator[None]:
        for layer in range(LAYERS):
            written.append((name, layer))
            yield

    ahead = LayersAhead([fill("a"), fill("b")], torch.device("cpu"))
    assert written == []
    for layer in range(LAYERS):
        ahead.reach_layer()
        assert written == [(name, done) for done in range(layer + 1) for name in "ab"]


def test_a_fill_that_is_done_is_left_alone():
    """A later piece of the same lift brings the same fill, which has no layer left."""
    fill = iter(range(LAYERS))
    for _ in range(2):
        ahead = LayersAhead([fill], torch.device("cpu"))
        for _ in range(LAYERS):
            ahead.reach_layer()
    assert list(fill) == []
