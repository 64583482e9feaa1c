"""What the routes of documents take, and the document parts of a chat request."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sglang_ext.documents.record import CompilerName
from sglang_ext.worker.bodies import Source


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Content(_Body):
    """What a document is."""

    text: str | None = Field(None, description="as it will stand in prompts: whole sentences with their leading space")
    ids: list[int] | None = Field(None, description="token ids, instead of a text")
    ttl: float | None = Field(None, gt=0, description="seconds that it lives; null: until it is deleted")
    cache_salt: str | None = Field(None, description="the tenant; a document is found under its own salt only")

    @model_validator(mode="after")
    def _one_content(self) -> Self:
        if (self.text is None) == (self.ids is None):
            raise ValueError("give either text or ids")
        return self


class DocumentBody(_Content):
    """POST /v1/documents."""

    method: CompilerName | None = Field(None, description="how it is compiled; null: the worker's default")


class MapBody(_Content):
    """POST /kv/map. It names an address, as /kv/lift does, and so is not for everybody."""

    source: Source = Field(description="the worker that compiles the document")
    pack: str | None = Field(None, description="a pack's name or digest; needed where more than one is loaded")


class LinkBody(_Body):
    """POST /kv/link."""

    input_ids: list[int] = Field(min_length=1)
    documents: list[str] = Field(min_length=1, description="ids of documents, in the order in which they stand")
    recompute: int = Field(0, ge=0, description="leading tokens of each document that are computed as well")
    rho: float | None = Field(None, ge=0, le=1, description="share of a mapped document that is computed as well")
    extra_key: str | None = Field(None, description="where the prompt would be looked for without documents")
    cache_salt: str | None = None


class DocumentPart(_Body):
    """A part of a message's content that stands where the document's text would be."""

    type: Literal["document"]
    id: str | None = None
    text: str | None = None

    @model_validator(mode="after")
    def _one_name(self) -> DocumentPart:
        if (self.id is None) == (self.text is None):
            raise ValueError("a document part has either an id or a text")
        return self


class LinkOptions(_Body):
    """The field `documents` of a chat request. method: of documents that are given by their text."""

    method: CompilerName | None = None
    recompute: int = Field(0, ge=0, description="leading tokens of each document that are computed as well")
    rho: float | None = Field(None, ge=0, le=1, description="share of a mapped document that is computed as well")

    @classmethod
    def of(cls, body: dict[str, Any]) -> LinkOptions:
        """Takes the field out of a request's body, which is mutated."""
        return cls.model_validate(body.pop("documents", None) or {})
