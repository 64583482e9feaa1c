"""Which prompts share a forward: so many of them, and no more tokens than memory should hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

MAX_TOKENS = 16_384


def batches(lengths: Sequence[int], most: int) -> Iterator[slice]:
    """Slices of at most `most` prompts of these lengths and MAX_TOKENS tokens, in their order; one at least."""
    start, tokens = 0, 0
    for at, length in enumerate(lengths):
        if at > start and (at - start == most or tokens + length > MAX_TOKENS):
            yield slice(start, at)
            start, tokens = at, 0
        tokens += length
    if lengths:
        yield slice(start, len(lengths))
