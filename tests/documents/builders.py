"""Documents of random KV, for laws that need no model, and prompts linked on tiny ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.documents.document import SOFT, Document
from sglang_ext.documents.link import Linked, Span, link
from sglang_ext.offline.documents.cache import LinkedCache
from sglang_ext.offline.executor import Row, TransformersExecutor
from tests.kv.builders import geometry, identity, random

GEOMETRY = geometry()


def document(ids: Sequence[int], header: int = 0, trailer: int = 0, name: str = "m", seed: int = 0) -> Document:
    """A document of these tokens with random KV."""
    tokens = torch.tensor([SOFT] * header + list(ids) + [SOFT] * trailer)
    shape = (GEOMETRY.layers, len(tokens), GEOMETRY.kv_heads, GEOMETRY.head_dim)
    block = KVBlock(tokens, random(seed, *shape), random(seed + 1, *shape), GEOMETRY, identity(name))
    return Document(block, header, trailer)


def run(executor: TransformersExecutor, spans: Sequence[Span]) -> tuple[Linked, Row, torch.Tensor]:
    """Links spans, fills and computes them. Returns the last logits [V] besides."""
    cache = LinkedCache(executor, link(spans))
    logits = cache.prefill(lambda linked, _reader: linked)
    return cache.linked, cache.row, logits[0]
