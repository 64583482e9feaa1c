"""The Writer's forward with gradients, layer by layer, and KV gradient checkpointing (equation 10).

Each layer of the Writer gives the next hidden state, and its keys and values, which the Reader takes later. The direct
way keeps what lies between them for the backward pass; the checkpointed way drops it and makes it again, with the
adapter on as it was. What stays of a layer is then its input, and the keys and values themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sglang_ext.attention import frontier_attention
from sglang_ext.offline.executor import TransformersExecutor

Switch = Callable[[nn.Module], AbstractContextManager]
"""Makes the context in which a decoder layer is the Writer's."""


class Written(NamedTuple):
    """What a layer gives.

    hidden: [1, N, hidden]; keys (rotated to their places in the document), values: [N, kv_heads, head_dim].
    """

    hidden: Tensor
    keys: Tensor
    values: Tensor


Step = Callable[[Tensor], Written]
Run = Callable[[Step, Tensor, Callable[[], AbstractContextManager]], Written]
"""Runs one layer's step on its input; the context is the one in which the step runs, again in the backward pass."""


def direct(step: Step, hidden: Tensor, context: Callable[[], AbstractContextManager]) -> Written:
    """Keeps everything for the backward pass."""
    with context():
        return step(hidden)


def checkpointed(step: Step, hidden: Tensor, context: Callable[[], AbstractContextManager]) -> Written:
    """Keeps the input alone; the step runs again, in the same context, when a gradient arrives."""
    # Entered here and not through context_fn, which is passed over where no gradient is asked for.
    with context():
        return checkpoint(
            step, hidden, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (nullcontext(), context())
        )


def reader_only(_layer: nn.Module) -> AbstractContextManager:
    """The switch of a method without an adapter."""
    return nullcontext()


def write(
    executor: TransformersExecutor, documents: Sequence[Tensor], switch: Switch = reader_only, run: Run = direct
) -> tuple[list[Tensor], list[Tensor]]:
    """The KV of documents, each by itself at positions from 0, with gradients.

    documents: embeddings [n, hidden] each. Returns per layer the keys without rotation, float32, and the values, both
    [sum n, kv_heads, head_dim], document after document.
    """
    body = executor.model.model
    lengths = [len(document) for document in documents]
    hidden = torch.cat(list(documents))[None]  # [1, N, hidden]
    places = torch.cat([torch.arange(length) for length in lengths]).to(hidden.device)
    turned = body.rotary_emb(hidden, places[None])
    unturn = executor.rotation.at(places)
    keys, values = [], []
    for layer in body.layers:

        def step(states: Tensor, layer: nn.Module = layer) -> Written:
            alone = _Alone(lengths)
            states = layer(
                states, attention_mask=None, position_ids=places[None], position_embeddings=turned, frontier=alone
            )
            return Written(states, alone.keys, alone.values)

        written = run(step, hidden, lambda layer=layer: switch(layer))
        hidden = written.hidden
        keys.append(unturn.unrotate(written.keys))
        values.append(written.values)
    return keys, values


class _Alone:
    """The attention of documents side by side in one sequence, none of which sees another. Keeps keys and values."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def attend(self, _layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """query: [N, query_heads, head_dim]; key, value: [N, kv_heads, head_dim], key rotated."""
        self.keys, self.values = key, value
        pieces = zip(*(side.split(self._lengths) for side in (query, key, value)), strict=True)
        return torch.cat([frontier_attention(q, torch.arange(len(q)), k, v, scale) for q, k, v in pieces])
