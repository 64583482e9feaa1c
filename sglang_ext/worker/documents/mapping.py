"""Mapping: another model's document through a pack into this model's KV space, kept like one that was compiled here.

Keys free of position make that one matrix product per layer and side. What the map cannot be trusted with is computed
where the document is linked: its tokens of largest rank disagreement, as in a lift.
"""

from __future__ import annotations

from typing import Mapping

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import BlockError, PackError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.transfer.pack import Pack
from sglang_ext.worker.answers import APPLIED, Answer, fallback
from sglang_ext.worker.documents.shelf import Shelf, Shelved
from sglang_ext.worker.documents.ways import document_of
from sglang_ext.worker.messages import MapReq
from sglang_ext.worker.ops import KVOps
from sglang_ext.worker.transport import SharedMemory


class DocumentMapper:
    """Answers requests to map (jobs.py, `Opener`): nothing is left to compute when one is opened."""

    def __init__(
        self,
        packs: Mapping[str, Pack],
        ops: KVOps,
        geometry: KVGeometry,
        identity: ModelIdentity,
        shelf: Shelf,
        memory: SharedMemory,
        device: torch.device,
    ) -> None:
        self._packs = packs
        self._ops = ops
        self._geometry = geometry
        self._identity = identity
        self._shelf = shelf
        self._memory = memory
        self._device = device

    def drop(self, request: MapReq) -> None:
        self._memory.drop(request.handle)

    def failed(self, reason: str) -> Answer:
        return fallback(reason)

    def finish(self, job: object) -> Answer:
        raise AssertionError("a request to map is answered when it is opened")

    def count(self, positions: int, forwards: int) -> None:
        """Nothing is computed."""

    def open(self, request: MapReq) -> Answer:
        phases = Phases()
        with phases("transfer"):
            block = self._fetch(request)
        shape = (len(block), self._geometry.kv_heads, self._geometry.head_dim)
        keys, values, outside = [], [], []
        for _, key, value, one in self._pack(request.pack).maps.predict(block, phases, self._ops.map_side):
            keys.append(key.view(shape).cpu())
            values.append(value.view(shape).cpu())
            outside.append(one)
        scores = torch.stack(outside).mean(0).cpu()
        mapped = KVBlock(block.tokens, torch.stack(keys), torch.stack(values), self._geometry, self._identity)
        self._shelf.put(request.key, Shelved(document_of(mapped), scores))
        return {
            "status": APPLIED, "reason": None, "tokens": len(block), "bytes": mapped.nbytes, "handle": None,
            "ms": dict(phases.ms),
        }  # fmt: skip

    def _fetch(self, request: MapReq) -> KVBlock:
        block = self._memory.fetch(request.handle)
        self._pack(request.pack).check_source(block.identity, block.geometry)
        if block.tokens.tolist() != request.ids:
            raise BlockError(f"the source's block has {len(block)} tokens, which are not the document's")
        block.check_finite()
        return block.to(self._device)

    def _pack(self, digest: str) -> Pack:
        try:
            return self._packs[digest]
        except KeyError:
            raise PackError(f"pack {digest[:12]} is not in use here; this worker has {sorted(self._packs)}") from None
