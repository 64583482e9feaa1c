"""The hand-over of the KV cache: which tiers, and how much is computed again."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from router.config.base import Name, Seconds, Section

Selector = Annotated[str, StringConstraints(pattern=r"^(rank_disagreement|source_attention|random(:\d+)?)$")]
"""What a worker can score tokens by (sglang_ext/transfer/selectors.py, which imports torch)."""


class LiftPair(Section):
    """The pack (name or digest) that lifts from one tier to another."""

    source: Name
    """The tier whose KV is lifted."""
    target: Name
    """A later tier, to which it is lifted."""
    pack: str
    """The pack's name or digest, as the target's workers have loaded it."""


class Lift(Section):
    """The hand-over of the KV cache. A pair that is not listed is never lifted."""

    pairs: list[LiftPair] = []
    """Which tiers lift to which."""
    rho: float = Field(default=0.3, ge=0, le=1)
    """Share of the prompt's positions that the target computes again."""
    coverage: float | None = Field(default=None, ge=0, le=1)
    """In place of rho: the fewest positions that hold this share of the sum of all scores."""
    selector: Selector = "rank_disagreement"
    """What the positions are scored by: rank_disagreement, source_attention, random or random:SEED."""
    when: Literal["faster", "always"] = "faster"
    """faster: where the target expects it to be faster than a prefill; always: in any case."""
    lease_s: Seconds = 10.0
    """How long the worker holds the lifted KV for the chat request."""
    timeout_s: Seconds = 5.0
    """Of one lift; after it the target prefills."""

    @model_validator(mode="after")
    def _one_budget(self) -> Lift:
        if self.coverage is not None and "rho" in self.model_fields_set:
            raise ValueError("give either 'rho' or 'coverage'")
        return self
