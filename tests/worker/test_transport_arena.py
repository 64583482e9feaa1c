"""The parts of a buffer: they never overlap, and what is given back can be had again."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import TransferError
from sglang_ext.worker.transport.arena import ALIGNMENT, Arena

SIZE = 16 * ALIGNMENT
STEPS = st.lists(st.one_of(st.integers(1, 6 * ALIGNMENT), st.integers(-8, -1)), max_size=60)
"""A positive number takes so many bytes; a negative one gives back one of the parts that are held."""


@given(STEPS)
@settings(deadline=None)
def test_parts_lie_inside_and_never_overlap(steps: list[int]):
    arena, held = Arena(SIZE), {}
    for step in steps:
        if step < 0 and held:
            offset = list(held)[step % len(held)]
            arena.give_back(offset)
            del held[offset]
        elif step > 0:
            gaps = _gaps(held)
            pages = -(-step // ALIGNMENT) * ALIGNMENT
            if max(gaps) < pages:
                with pytest.raises(TransferError, match="no room"):
                    arena.take(step)
            else:
                offset = arena.take(step)
                assert offset % ALIGNMENT == 0
                assert 0 <= offset and offset + step <= SIZE
                assert all(offset + step <= start or stop <= offset for start, stop in held.items())
                held[offset] = offset + pages
        assert arena.held_bytes == sum(stop - start for start, stop in held.items())
    for offset in held:
        arena.give_back(offset)
    assert arena.take(SIZE) == 0


def _gaps(held: dict[int, int]) -> list[int]:
    """The free bytes between parts, and at the ends."""
    edges = [0, *(edge for part in sorted(held.items()) for edge in part), SIZE]
    return [stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def test_a_part_is_given_back_once():
    arena = Arena(SIZE)
    offset = arena.take(1)
    arena.give_back(offset)
    with pytest.raises(KeyError):
        arena.give_back(offset)


def test_what_does_not_fit_is_refused_with_what_is_in_use_and_the_option():
    arena = Arena(SIZE)
    arena.take(ALIGNMENT + 1)
    with pytest.raises(TransferError, match=f"{SIZE} bytes: {2 * ALIGNMENT} of .* in use .--kv-buffer-bytes"):
        arena.take(SIZE)
