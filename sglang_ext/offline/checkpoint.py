"""The moments of an unfinished calibration on disk, so that a killed one goes on instead of starting again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_ext.errors import CalibrationError

EVERY = 32_000  # calibration tokens between two checkpoints


class Position(NamedTuple):
    """How far the pass over the corpus has come: prompts fitted, and the digest of their token ids."""

    prompts: int
    digest: str


START = Position(0, "")


class Checkpoint:
    """One file beside the pack's folder, replaced as a whole each `every` calibration tokens."""

    def __init__(self, out: Path, every: int = EVERY) -> None:
        """out: the folder that the calibration writes to."""
        self.path = out.with_name(f"{out.name}.moments.safetensors")
        self.every = every
        self._unfinished = self.path.with_suffix(".unfinished")

    def save(self, state: Mapping[str, torch.Tensor], position: Position, made_for: Mapping[str, str]) -> None:
        """Writes moments, position and what both depend on. What lay there before stays until all is written."""
        about = {"made_for": json.dumps(made_for), "prompts": str(position.prompts), "digest": position.digest}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: one.cpu() for name, one in state.items()}, str(self._unfinished), metadata=about)
        self._unfinished.replace(self.path)

    def load(self, made_for: Mapping[str, str]) -> tuple[Position, dict[str, torch.Tensor]] | None:
        """What `save` wrote, or None where there is none.

        Raises CalibrationError for a file that cannot be read and for one of other settings or models; the
        message names what differs.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(str(self.path), framework="pt") as file:
                about = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}
            theirs = json.loads(about["made_for"])
            position = Position(int(about["prompts"]), about["digest"])
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise CalibrationError(
                f"the checkpoint {self.path} cannot be read: {error}; delete it to start afresh"
            ) from error
        differs = [
            f"{name} was {theirs.get(name)!r}, is {made_for.get(name)!r}"
            for name in sorted({*theirs, *made_for})
            if theirs.get(name) != made_for.get(name)
        ]
        if differs:
            raise CalibrationError(
                f"the checkpoint {self.path} is of another calibration: {'; '.join(differs)}; "
                "delete it to start afresh, or write to another folder"
            )
        return position, state

    def delete(self) -> None:
        """Removes the file, and what a kill in the middle of a `save` left."""
        for path in (self.path, self._unfinished):
            path.unlink(missing_ok=True)
