"""Compiling: a document's tokens run by themselves from position 0, and their KV taken out (SemPIC, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Mapping

import torch

from sglang_ext.block import KVBlock
from sglang_ext.documents.document import SOFT, Document
from sglang_ext.errors import DocumentError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.worker.answers import APPLIED, Answer, fallback
from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.documents.shelf import Shelf, Shelved
from sglang_ext.worker.documents.ways import Way, document_of
from sglang_ext.worker.messages import CompileReq
from sglang_ext.worker.opened import OpenJob
from sglang_ext.worker.ops import KVOps
from sglang_ext.worker.pool import Pool
from sglang_ext.worker.transport import SharedMemory


@dataclass(eq=False, kw_only=True)
class OpenCompile(OpenJob):
    """A document that is compiled. It builds upon nothing and goes into no tree."""

    phase: ClassVar[str] = "compile"


class DocumentCompiler:
    """Opens and ends compilations (jobs.py, `Opener`)."""

    def __init__(
        self,
        pool: Pool,
        ops: KVOps,
        geometry: KVGeometry,
        identity: ModelIdentity,
        shelf: Shelf,
        memory: SharedMemory,
        ways: Mapping[str, Way],
        counters: SchedulerCounters,
    ) -> None:
        """ways: by method."""
        self._pool = pool
        self._ops = ops
        self._geometry = geometry
        self._identity = identity
        self._rotation = Rotation(geometry.rope, pool.device)
        self._shelf = shelf
        self._memory = memory
        self._ways = ways
        self._counters = counters

    def drop(self, request: CompileReq) -> None:
        """A request holds nothing."""

    def failed(self, reason: str) -> Answer:
        return fallback(reason)

    def count(self, positions: int, forwards: int) -> None:
        self._counters.document_batches += forwards
        self._counters.compiled_positions += positions

    def open(self, request: CompileReq) -> OpenCompile | Answer:
        """The answer at once where the document is here already."""
        held = self._shelf.get(request.key)
        if held is not None:
            return self._answer(request, held.document, Phases())
        way = self._ways.get(request.method)
        if way is None:
            raise DocumentError(
                f"this worker does not compile by {request.method!r}; it was started for {', '.join(self._ways)}"
            )
        tokens = way.enclosed(request.ids)
        return OpenCompile(
            request=request, tokens=tokens, held=self._pool.nothing,
            fresh=self._pool.allocate(self._pool.page_ceil(len(tokens))), chosen=torch.arange(len(tokens)),
            phases=Phases(), writing=way.writing, soft=way.soft,
        )  # fmt: skip

    def finish(self, one: OpenCompile) -> Answer:
        """Takes the block out of the pool, onto the shelf."""
        try:
            with one.phases("read"):
                count = len(one.tokens)
                turn = self._rotation.at(torch.arange(count, device=self._pool.device))
                keys, values = self._ops.read(self._pool.buffers, one.fresh[:count], turn)
                tokens = torch.where(one.tokens < 0, SOFT, one.tokens)
                block = KVBlock(tokens, keys, values, self._geometry, self._identity).to(torch.device("cpu"))
                block.check_finite()
        finally:
            self._pool.free(one.fresh)
        document = document_of(block)
        self._shelf.put(one.request.key, Shelved(document))
        return self._answer(one.request, document, one.phases)

    def _answer(self, request: CompileReq, document: Document, phases: Phases) -> Answer:
        handle = None
        if request.publish:
            with phases("publish"):
                handle = self._memory.publish(document.block, request.rid)
        return {
            "status": APPLIED, "reason": None, "tokens": len(document), "bytes": document.block.nbytes,
            "handle": handle, "ms": dict(phases.ms),
        }  # fmt: skip
