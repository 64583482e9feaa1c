"""Compilers: from a document's tokens to its KV, each document by itself (section 5).

All of them are one forward of the model over the document alone, at positions from 0. A method says what is
different in that forward: plain changes nothing, KV Packet puts learned embeddings around the tokens, SemPIC runs the
model as the Writer (its LoRA adapter on), Joint does both. None of them runs anything when the document is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum

import torch

from sglang_ext.documents.document import SOFT, Document
from sglang_ext.errors import DocumentError
from sglang_ext.offline.executor import TransformersExecutor, Work


class Method(str, Enum):
    """How a document is compiled."""

    PLAIN = "plain"
    PACKET = "packet"
    SEMPIC = "sempic"
    JOINT = "joint"


@dataclass(frozen=True)
class Envelope:
    """The learned embeddings around a document: float [8, hidden] each in the paper, and none (0 rows) without."""

    header: torch.Tensor
    trailer: torch.Tensor


@dataclass(frozen=True)
class Compiler:
    """Compiles documents with one model.

    writing: makes the context in which the model is the Writer, and out of which it is the unchanged Reader; envelope:
    what stands around the tokens. Neither for plain KV, both for Joint.
    """

    executor: TransformersExecutor
    writing: Callable[[], AbstractContextManager] | None = None
    envelope: Envelope | None = None

    @property
    def method(self) -> Method:
        if self.writing is None:
            return Method.PLAIN if self.envelope is None else Method.PACKET
        return Method.SEMPIC if self.envelope is None else Method.JOINT

    def compile(self, documents: Sequence[Sequence[int]]) -> list[Document]:
        """One forward for all of them; none sees another. Raises DocumentError for a document without tokens."""
        if not documents:
            return []
        for ids in documents:
            if not len(ids):
                raise DocumentError("a document of 0 tokens cannot be compiled")
        work = [self._work(ids) for ids in documents]
        with self.writing() if self.writing is not None else nullcontext():
            self.executor.compute(work)
        return [self._document(piece) for piece in work]

    def _work(self, ids: Sequence[int]) -> Work:
        tokens = torch.tensor(ids, dtype=torch.int64)
        embeddings = None
        if self.envelope is not None:
            header, trailer = self.envelope.header, self.envelope.trailer
            own = self.executor.model.model.embed_tokens(tokens.to(self.executor.model.device))
            embeddings = torch.cat([header.to(own), own, trailer.to(own)]).detach()
            tokens = torch.cat([torch.full((len(header),), SOFT), tokens, torch.full((len(trailer),), SOFT)])
        return Work(self.executor.row(len(tokens)), tokens, torch.arange(len(tokens)), embeddings)

    def _document(self, piece: Work) -> Document:
        block = self.executor.block(piece.row, piece.tokens)
        if self.envelope is None:
            return Document(block)
        return Document(block, len(self.envelope.header), len(self.envelope.trailer))
