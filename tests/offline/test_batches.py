"""Batches cover all prompts in their order, within both limits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offline.batches import MAX_TOKENS, batches
from tests.kv.builders import laws


@laws
@given(st.lists(st.integers(1, 2 * MAX_TOKENS), max_size=20), st.integers(1, 6))
def test_every_prompt_is_in_one_batch_and_no_batch_could_take_the_next(lengths, most):
    parts = [lengths[part] for part in batches(lengths, most)]
    assert [length for part in parts for length in part] == lengths
    for part in parts:
        assert len(part) <= most
        assert sum(part) <= MAX_TOKENS or len(part) == 1
    for part, following in pairwise(parts):
        assert len(part) == most or sum(part) + following[0] > MAX_TOKENS
