"""The student of distillation: the unchanged Reader over documents that the Writer has just compiled (equation 7).

Plan and positions come from `link`, keys from the one rotation, attention from the one rule; what is new is only that
gradients flow through the documents' keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglang_ext.attention import frontier_attention
from sglang_ext.block import KVBlock
from sglang_ext.documents.checkpointing import Run, direct, reader_only, write
from sglang_ext.documents.corpus import Record
from sglang_ext.documents.document import SOFT, Document
from sglang_ext.documents.link import Linked, link
from sglang_ext.errors import DocumentError
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.rope import Turn


@dataclass
class Student:
    """A model that compiles documents as a method does and reads them as it is.

    switch: makes the context in which a decoder layer is the Writer's; header, trailer: embeddings [h, hidden] around
    each document, or None; run: how the Writer's layers run, `direct` or `checkpointed`.
    """

    executor: TransformersExecutor
    switch: Callable[[nn.Module], AbstractContextManager] = reader_only
    header: Tensor | None = None
    trailer: Tensor | None = None
    run: Run = direct

    def logits(self, records: Sequence[Record], answers: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits float32 [n, vocabulary] that predict each record's answer of n tokens, with gradients."""
        texts = [ids for record in records for ids, is_document in record.spans if is_document]
        keys, values = self._write(texts)
        prompts, at = [], 0
        for record, answer in zip(records, answers, strict=True):
            linked = self._link(record, answer)
            size = sum(len(one.document) for one in linked.placed)
            prompts.append(_Prompt(linked, slice(at, at + size), self.executor))
            at += size
        reading = _Reading(prompts, keys, values)
        del keys, values
        embedded = torch.cat([self._embed(prompt.tokens) for prompt in prompts])
        positions = torch.cat([prompt.positions for prompt in prompts]).to(embedded.device)
        hidden = self.executor.model.model(
            inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, frontier=reading
        ).last_hidden_state[0]
        states = hidden.split([len(prompt.positions) for prompt in prompts])
        last = torch.cat([one[-len(answer) :] for one, answer in zip(states, answers, strict=True)])
        return list(self.executor.model.lm_head(last).float().split([len(answer) for answer in answers]))

    def _write(self, texts: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
        """Per layer, the KV of all documents one after the other."""
        if not texts:
            return [], []
        return write(self.executor, [self._wrapped(ids) for ids in texts], self.switch, self.run)

    def _wrapped(self, ids: Sequence[int]) -> Tensor:
        own = self._embed(torch.tensor(ids))
        if self.header is None:
            return own
        return torch.cat([self.header.to(own), own, self.trailer.to(own)])

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.executor.model.model.embed_tokens(tokens.to(self.executor.model.device))

    def _link(self, record: Record, answer: Sequence[int]) -> Linked:
        """The layout of prompt and answer; the answer's last token is predicted, not read."""
        soft = (0, 0) if self.header is None else (len(self.header), len(self.trailer))
        spans = [self._outline(ids, *soft) if is_document else ids for ids, is_document in record.spans]
        if not answer:
            raise DocumentError("a record needs an answer of at least one token to train on")
        return link([*spans, list(answer[:-1])])

    def _outline(self, ids: Sequence[int], header: int, trailer: int) -> Document:
        """A document of which only the length counts: its KV takes no memory."""
        g = self.executor.geometry
        tokens = torch.tensor([SOFT] * header + list(ids) + [SOFT] * trailer)
        nothing = torch.zeros(()).expand(g.layers, len(tokens), g.kv_heads, g.head_dim)
        return Document(KVBlock(tokens, nothing, nothing, g, self.executor.identity), header, trailer)


class _Prompt:
    """A linked prompt's share of the microbatch. `documents`: its rows of the documents' KV."""

    def __init__(self, linked: Linked, documents: slice, executor: TransformersExecutor) -> None:
        device = executor.model.device
        self.positions = linked.plan.compute
        self.tokens = linked.tokens[self.positions]
        self.documents = documents
        filled = linked.plan.filled.to(device)
        self.turn: Turn = executor.rotation.at(filled)
        # Documents first, then computed entries: where each logical position's entry stands among them.
        self.places = torch.cat([filled, self.positions.to(device)]).argsort()


class _Reading:
    """The attention of a microbatch of linked prompts, one layer after the other."""

    def __init__(self, prompts: Sequence[_Prompt], keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._prompts = prompts
        self._documents = dict(enumerate(zip(keys, values, strict=True)))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query: [N, query_heads, head_dim]; key, value: [N, kv_heads, head_dim], key rotated."""
        # Taken out for good: the backward pass keeps the linked copies, and both would be twice the memory.
        documents = self._documents.pop(layer, (key[:0], value[:0]))
        sizes = [len(prompt.positions) for prompt in self._prompts]
        pieces = zip(self._prompts, *(side.split(sizes) for side in (query, key, value)), strict=True)
        return torch.cat([self._one(prompt, documents, *piece, scale) for prompt, *piece in pieces])

    def _one(
        self, prompt: _Prompt, documents: tuple[Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        keys, values = (side[prompt.documents] for side in documents)
        moved = prompt.turn.rotate(keys).to(key.dtype)
        return frontier_attention(
            query,
            prompt.positions,
            torch.cat([moved, key])[prompt.places],
            torch.cat([values, value])[prompt.places],
            scale,
        )
