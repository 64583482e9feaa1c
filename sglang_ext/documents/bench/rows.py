"""What the bench writes: one row per length of a document."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class TtftRow(BaseModel):
    """Full prefill against linking, of prompts with the same numbers of tokens. Milliseconds, medians of the rounds.

    Time to first token is that of a streamed chat request: from its sending to its first event.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    documents: int = Field(description="in each prompt")
    length: int = Field(description="tokens of each document")
    prompt: int = Field(description="tokens of the prompt, the chat template's included")
    computed: int = Field(description="tokens that the linked prompt computes: all that are no document's")
    full_ms: float
    linked_ms: float
    ratio: float = Field(description="median of full / linked within each round")
    compile_ms: float = Field(description="compiling one document, once, over HTTP")
    phases_ms: dict[str, float] = Field(description="of the linked requests")
    rounds: int
    full_range_ms: tuple[float, float] = Field(description="least and greatest of the rounds")
    linked_range_ms: tuple[float, float]


class TtftResult(BaseModel):
    """`results/documents-ttft.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    model_digest: str
    kernels: str
    method: str
    rows: list[TtftRow]


def write_result(path: Path, result: TtftResult) -> None:
    """Replaces the file at once or not at all, so that it is whole whenever a run ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(result.model_dump_json(indent=2) + "\n")
    scratch.replace(path)
