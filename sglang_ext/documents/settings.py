"""How a Writer is trained, and what a caller may show while it is."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Trained = Literal["packet", "sempic", "joint"]


class TrainSettings(BaseModel):
    """The defaults are the paper's (table 4 and appendix B)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Trained = Field(description="packet: soft tokens around documents; sempic: LoRA in the Writer; joint: both")
    rank: int = Field(8, ge=1, description="of LoRA on q/k/v/o")
    alpha: float = Field(16, gt=0, description="LoRA's scale is alpha / rank")
    soft: int = Field(8, ge=1, description="header tokens, and as many trailer tokens")
    epochs: int = Field(5, ge=1)
    rate: float = Field(5e-4, gt=0, description="learning rate, falling in a straight line to zero")
    temperature: float = Field(1.0, gt=0, description="tau of equation 8")
    batch: int = Field(64, ge=1, description="records of one update")
    microbatch: int = Field(8, ge=1, description="records of one forward")
    answer: int = Field(64, ge=1, description="most tokens of a teacher's answer")
    seed: int = 0

    @property
    def has_adapter(self) -> bool:
        return self.method != "packet"

    @property
    def has_soft_tokens(self) -> bool:
        return self.method != "sempic"


class Progress:
    """What a caller may show while training. This one shows nothing."""

    def taught(self, seen: int, wanted: int) -> None:
        """So many records have a teacher's answer."""

    def updates(self, seen: int, wanted: int, loss: float | None) -> None:
        """loss: of the last update, nats per token; None where there was none yet."""

    def resumed(self, updates: int) -> None:
        """A checkpoint was found: this many updates need not be made again."""
