"""What each arm gave for each item, kept on disk, so that a run that was stopped goes on where it was.

One JSON-lines file per arm, named by the digest of all that its outcomes depend on. Lines are appended when a
batch is done; an arm that was never finished is read as far as it goes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from sglang_ext.offline.evaluate.errors import EvaluationError


class OfItem(BaseModel):
    """Base of what is kept. item: digest of the prompt's ids and the length of the answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    item: str


class Outcome(OfItem):
    """One arm's result for one item.

    text: the answer, where answers are measured; agree,
    kl, tokens: agreeing tokens, summed KL in nats and tokens, where fidelity is; recomputed: a bit per position of
    the prompt, the last one (always computed, never chosen) left 0, in hexadecimal; empty where the arm
    recomputes no positions of its choice.
    """

    text: str = ""
    agree: int = 0
    kl: float = 0.0
    tokens: int = 0
    recomputed: str = ""
    length: int = 0


class Agreement(OfItem):
    """One prompt's overlap of each layer's own top set with the shared one, by score (figure 12)."""

    rank_disagreement: tuple[float, ...]
    mapping_error: tuple[float, ...]


Kept = TypeVar("Kept", bound=OfItem)


class Store:
    """A folder of outcomes. `unfinished` counts the lines that a killed run left incomplete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.unfinished = 0

    def read(self, key: Mapping[str, Any], kind: type[Kept]) -> dict[str, Kept]:
        """What is kept of an arm, by item. Cuts off a last line that was not written whole."""
        path = self._path(key)
        if not path.exists():
            return {}
        whole, _, rest = path.read_bytes().rpartition(b"\n")
        if rest:
            self.unfinished += 1
            path.write_bytes(whole + b"\n" if whole else b"")
        kept = {}
        for number, line in enumerate(whole.split(b"\n")[1:], start=2):
            try:
                one = kind.model_validate_json(line)
            except ValidationError as error:
                raise EvaluationError(f"{path}:{number}: not an outcome of this release; delete the file") from error
            kept[one.item] = one
        return kept

    def append(self, key: Mapping[str, Any], outcomes: Iterable[Kept]) -> None:
        """Adds outcomes at the end; the first line of a file says what they are outcomes of."""
        path = self._path(key)
        lines = [one.model_dump_json(exclude_defaults=True) for one in outcomes]
        if not path.exists() or path.stat().st_size == 0:
            lines.insert(0, json.dumps(key, sort_keys=True))
        with path.open("a") as file:
            file.write("\n".join(lines) + "\n")

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._folder / f"{xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())}.jsonl"


def item_digest(ids: Sequence[int], limit: int) -> str:
    """Names a prompt and how long its answer may be."""
    return xxhash.xxh3_128_hexdigest(json.dumps([list(ids), limit]).encode())


def packed(positions: torch.Tensor, length: int) -> str:
    """Positions [C] of a prompt of `length` tokens as hexadecimal bits."""
    bits = 0
    for position in positions.tolist():
        bits |= 1 << position
    return f"{bits:0{(length + 3) // 4}x}"


def unpacked(text: str, length: int) -> torch.Tensor:
    """bool [length]: the inverse of `packed`."""
    bits = int(text, 16)
    return torch.tensor([bool(bits >> position & 1) for position in range(length)])
