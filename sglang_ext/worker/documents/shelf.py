"""Compiled documents in the scheduler's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from sglang_ext.documents.document import Document
from sglang_ext.documents.lru import SizedLRU


@dataclass(frozen=True)
class Shelved:
    """A document, and where another model's was mapped to be this one, the disagreement of its tokens: float32 [n]."""

    document: Document
    scores: torch.Tensor | None = None


Shelf: TypeAlias = SizedLRU[str, Shelved]
"""By the keys of their KV."""


def shelf_of(limit: int) -> Shelf:
    """A shelf for so many bytes of KV."""
    return SizedLRU(limit, lambda shelved: shelved.document.block.nbytes)
