"""What the worker's routes take. Unknown keys are refused: a misspelt budget must not pass unseen."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, scorer_named


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LinkedDocuments(NamedTuple):
    """Documents in a prompt: their ids, in their order, and how many leading tokens of each were computed."""

    documents: tuple[str, ...]
    recompute: int


NO_DOCUMENTS = LinkedDocuments((), 0)


class Source(_Body):
    """The worker that holds the prompt's KV."""

    url: str
    api_key: str | None = None
    cache_salt: str | None = None


class LiftBody(_Body):
    """POST /kv/lift."""

    request: dict[str, Any] | None = Field(None, description="the chat or completion body, as it will be sent here")
    input_ids: list[int] | None = Field(None, description="token ids, instead of a request")
    source: Source
    pack: str | None = Field(None, description="a pack's name or digest; needed where more than one is loaded")
    rho: float | None = Field(None, ge=0, le=1, description="budget: this share of the prompt's positions")
    coverage: float | None = Field(None, ge=0, le=1, description="budget, instead: this share of the scores' sum")
    selector: str = Field(RANK_DISAGREEMENT, description="rank_disagreement, source_attention, random or random:SEED")
    when: Literal["faster", "always"] = Field(
        "faster", description="lift only where that is expected to be faster than a native prefill, or in any case"
    )
    cache_salt: str | None = None
    lease_s: float | None = Field(None, gt=0, le=600)
    timeout_s: float | None = Field(None, gt=0, le=600)
    explain: bool = Field(False, description="also answer with the chosen positions and all scores")

    @model_validator(mode="after")
    def _one_prompt(self) -> LiftBody:
        if (self.request is None) == (self.input_ids is None):
            raise ValueError("give either request (a chat or completion body) or input_ids")
        if self.rho is not None and self.coverage is not None:
            raise ValueError("give either rho or coverage")
        scorer_named(self.selector)
        return self


class ExportBody(_Body):
    """POST /kv/export."""

    input_ids: list[int] = Field(min_length=1)
    cache_salt: str | None = None
    attention: bool = Field(False, description="also say how much attention each token received")
    keep_s: float | None = Field(None, gt=0, le=900, description="how long the block waits for its reader")
    document: bool = Field(False, description="the ids are a document by itself, which is compiled where it is not yet")
    documents: list[str] = Field([], description="ids of documents in the prompt, in their order; unknown: not linked")
    recompute: int = Field(0, ge=0, description="leading tokens of each document that were computed")
    transports: list[str] = Field(["shm"], description="what the reader takes a block from")
    place: str | None = Field(None, description="names the reader's shared memory; null: it is this worker's")


class ReleaseBody(_Body):
    """POST /kv/release."""

    handle: str | None = None
    lease: str | None = None
