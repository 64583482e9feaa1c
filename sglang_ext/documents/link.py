"""Linking: from inline spans and compiled documents to one prefill plan (section 2, appendix C).

Every token gets its logical position in the order of the spans; each document's keys are to be moved there
(equation 3: `KVBlock.keys_at`, or `TransformersExecutor.fill_block`); what is not filled is computed in one
frontier-causal forward, the last token always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from sglang_ext.documents.document import SOFT, Document
from sglang_ext.errors import BlockError, PlanError
from sglang_ext.plan import Fill, FillKind, PrefillPlan, repaired

Span: TypeAlias = "Sequence[int] | Document"  # inline ids, or a document


@dataclass(frozen=True)
class Placed:
    """A document in a prompt; start: the logical position of its block's first entry, the header's where it has one."""

    document: Document
    start: int

    @property
    def stop(self) -> int:
        return self.start + len(self.document)

    @property
    def own(self) -> range:
        """Positions of the document's own tokens, without header and trailer."""
        return range(self.start + self.document.header, self.stop - self.document.trailer)


@dataclass(frozen=True)
class Linked:
    """A prompt of T positions. tokens: int64 [T], `SOFT` at soft entries; placed: the documents, in their order.

    plan: fills each document's span and computes everything else, and the last position.
    """

    tokens: torch.Tensor
    placed: tuple[Placed, ...]
    plan: PrefillPlan

    def __len__(self) -> int:
        return self.plan.length

    @property
    def candidates(self) -> torch.Tensor:
        """int64, ascending: the documents' own tokens, of which planners may compute some; never the last position."""
        positions = [torch.arange(one.own.start, one.own.stop) for one in self.placed]
        listed = torch.cat([torch.arange(0), *positions])
        return listed[listed < len(self) - 1]

    @property
    def query(self) -> range:
        """Positions after the last document: what the prompt asks. At least the last position."""
        end = self.placed[-1].stop if self.placed else 0
        return range(min(end, len(self) - 1), len(self))

    def computing(self, positions: torch.Tensor) -> Linked:
        """The same prompt with `positions` (int64) computed as well.

        Raises PlanError outside the prompt, and for a soft entry, which has no token to compute.
        """
        plan = repaired(len(self), self.plan.fills, positions)
        if bool((self.tokens[plan.compute] == SOFT).any()):
            raise PlanError("headers and trailers are learned entries: only tokens can be computed")
        return replace(self, plan=plan)


def link(spans: Sequence[Span], kind: FillKind = FillKind.DOCUMENT) -> Linked:
    """Lays out spans in their order: documents first or last, repeated or side by side, empty inline spans.

    kind: `MAPPED` where the documents are another model's and go through a pack. A document that ends the prompt is
    linked without its trailer, because the position that gives the first token's logits must be a token's. Raises
    BlockError for documents of different models, PlanError for a prompt without tokens.
    """
    parts = [span for span in spans if len(span)]
    if parts and isinstance(parts[-1], Document):
        parts[-1] = parts[-1].without_trailer()
    placed, tokens, at = [], [], 0
    for part in parts:
        if isinstance(part, Document):
            placed.append(Placed(part, at))
            tokens.append(part.block.tokens)
        else:
            tokens.append(torch.tensor(part, dtype=torch.int64))
        at += len(part)
    _check_one_model(placed)
    fills = [Fill(one.start, one.stop, kind) for one in placed]
    plan = repaired(at, fills, torch.tensor([], dtype=torch.int64))
    return Linked(torch.cat(tokens), tuple(placed), plan)


def _check_one_model(placed: Sequence[Placed]) -> None:
    models = {one.document.block.identity.model for one in placed}
    if len(models) > 1:
        raise BlockError(
            f"the documents were compiled by {len(models)} different models ({', '.join(m[:12] for m in sorted(models))}); "
            "compile them all with the one that reads them"
        )


@dataclass(frozen=True)
class Located:
    """spans: what `link` takes, which renders the prompt's ids again; missed: indices of documents that are not there."""

    spans: tuple[Span, ...]
    missed: tuple[int, ...]


def locate(prompt: Sequence[int], documents: Sequence[Document]) -> Located:
    """Finds documents, given in the order in which they stand, in a rendered prompt's ids.

    A document is found where its ids are a contiguous slice of the prompt behind the one found before it. One that is
    not, because the tokens at its edges merged with their neighbours, is a miss: its tokens stay inline.
    """
    text = _packed(prompt)
    spans: list[Span] = []
    missed, end = [], 0
    for index, document in enumerate(documents):
        start = _find(text, _packed(document.ids), end)
        if start is None:
            missed.append(index)
            continue
        spans += [prompt[end:start], document]
        end = start + len(document.ids)
    return Located((*spans, prompt[end:]), tuple(missed))


_ID_BYTES = 8


def _packed(ids: Sequence[int]) -> bytes:
    return torch.tensor(ids, dtype=torch.int64).numpy().tobytes()


def _find(text: bytes, part: bytes, start: int) -> int | None:
    """The first place of one id list in another, from `start` on."""
    at = text.find(part, start * _ID_BYTES)
    while at % _ID_BYTES and at >= 0:  # a match across the border of two ids
        at = text.find(part, at + 1)
    return at // _ID_BYTES if at >= 0 else None
