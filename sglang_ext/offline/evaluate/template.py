"""Which tokens of a prompt are template: what all prompts of a task begin and end with, and the turn markers.

The longest common prefix and the longest common suffix, in tokens, of all prompts of one task: for the tiny family
that is the system prompt, the task's instruction and the header of the answer. Added to it is every special token.
A task with a single prompt has no template: nothing can be told from content.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Template:
    """The lengths of the common prefix and suffix in tokens, and the special ids."""

    prefix: int
    suffix: int
    special: frozenset[int]

    def mask(self, ids: Sequence[int]) -> torch.Tensor:
        """bool [T]: which positions are template."""
        mask = torch.tensor([token in self.special for token in ids])
        mask[: self.prefix] = True
        mask[max(0, len(ids) - self.suffix) :] = True
        return mask


def templates(prompts: Iterable[tuple[str, Sequence[int]]], special: Collection[int]) -> dict[str, Template]:
    """The template of each task that has two prompts or more. prompts: (task, token ids)."""
    first: dict[str, Sequence[int]] = {}
    found: dict[str, Template] = {}
    for task, ids in prompts:
        one = first.setdefault(task, ids)
        if one is ids:
            continue
        known = found.get(task, Template(len(one), len(one), frozenset(special)))
        prefix = _common(one[: known.prefix], ids)
        suffix = _common(one[::-1][: known.suffix], ids[::-1])
        found[task] = Template(prefix, suffix, known.special)
    return found


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))
