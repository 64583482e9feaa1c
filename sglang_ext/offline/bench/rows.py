"""What a bench writes: one row per shape, prompt length, batch and budget."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

PHASES = ("gather", "map", "score", "write", "recompute")


class BenchRow(BaseModel):
    """One lift against native prefill. Times are medians over the rounds; a batch counts as one operation."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: str
    tokens: int = Field(description="T of each prompt")
    batch: int = Field(description="prompts of one operation")
    rho: float
    native_ms: float
    lift_ms: float
    speedup: float = Field(description="native_ms / lift_ms")
    ceiling_dense: float
    ceiling_frontier: float
    share_of_ceiling: float = Field(description="speedup / ceiling_frontier")
    phases_ms: dict[str, float]
    rounds: int
    native_range_ms: tuple[float, float] = Field(description="least and greatest of the rounds")
    lift_range_ms: tuple[float, float] = Field(description="least and greatest of the rounds")

    @property
    def overhead(self) -> float:
        """The share of the lift that map and score take."""
        return (self.phases_ms.get("map", 0.0) + self.phases_ms.get("score", 0.0)) / self.lift_ms


class ShapeRecord(BaseModel):
    """What equation 11 counts of one shape."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str
    target: str
    body: int = Field(description="P_T")
    map: int = Field(description="P_map")
    probe: int = Field(description="P_probe")
    alpha: int


class BenchResult(BaseModel):
    """`results/bench.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str
    threads: int
    dtype: str
    torch: str
    selector: str
    shapes: dict[str, ShapeRecord]
    rows: list[BenchRow]


def write_result(path: Path, result: BenchResult) -> None:
    """Replaces the file at once or not at all, so that it is whole whenever a run ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f"{path.name}.part")
    scratch.write_text(result.model_dump_json(indent=2) + "\n")
    scratch.replace(path)
