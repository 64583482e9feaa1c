"""How a pack is calibrated, and what a caller may show while it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sglang_ext.offline.acceptance import Repair
from sglang_ext.transfer.maps import Structure


@dataclass(frozen=True)
class Settings:
    """How to calibrate; the defaults of the paper's Qwen3 pair where it has one (section 4.1).

    Several structures are solved from one pass over the corpus; each gives a pack of its own.
    """

    name: str
    structures: tuple[Structure, ...] = ("full",)
    k: int = 8
    rank: int = 128
    ridge: float = 0.01
    tokens: int = 128_000  # calibration tokens, after the stride
    stride: int = 1
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    repair: Repair = field(default_factory=Repair)  # of the acceptance record
    accept_prompts: int = 48
    bench_only: bool = False


class Progress:
    """What a caller may show while calibrating. This one shows nothing."""

    def tokens(self, seen: int, wanted: int) -> None: ...

    def prompts(self, seen: int, wanted: int) -> None: ...

    def resumed(self, prompts: int) -> None:
        """A checkpoint was found: this many prompts need not be run again."""

    def left_out(self, prompts: int) -> None:
        """This many prompts had fewer than two tokens and were neither fitted nor held out."""
