"""Linking: a prompt whose fills are documents, computed and published like a lift (SemPIC, section 2).

Opening a link moves each document's keys to where it stands; what is computed is every other token, in one
frontier-causal forward; its end is the insert, in a namespace of these documents at these places.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from sglang_ext.block import KVBlock
from sglang_ext.documents.document import SOFT
from sglang_ext.documents.link import Linked
from sglang_ext.errors import BlockError, KVLiftError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.worker.answers import APPLIED, Answer, fallback
from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.documents.layout import Budget, Layout, laid_out
from sglang_ext.worker.documents.namespaces import ancestors, namespace_of
from sglang_ext.worker.documents.shelf import Shelf, Shelved
from sglang_ext.worker.documents.ways import document_of
from sglang_ext.worker.fill import Filler, Piece
from sglang_ext.worker.leases import Leased, Leases
from sglang_ext.worker.messages import ExportReq, LinkReq
from sglang_ext.worker.opened import OpenJob
from sglang_ext.worker.pool import Pool, Prefix, Where
from sglang_ext.worker.tails import Tail
from sglang_ext.worker.transport import SharedMemory

ABSENT = "absent"
"""The answer's status where blocks are not here; nothing was done, and the handles that were given are still good."""


@dataclass(eq=False, kw_only=True)
class OpenLink(OpenJob):
    """A link. `cached` of its first positions were here; it ends at the prefix that is published."""

    phase: ClassVar[str] = "inline"

    layout: Layout
    where: Where
    end: int
    cached: int


class Linker:
    """Opens and publishes links (jobs.py, `Opener`)."""

    def __init__(
        self,
        pool: Pool,
        filler: Filler,
        leases: Leases[Tail],
        memory: SharedMemory,
        shelf: Shelf,
        geometry: KVGeometry,
        identity: ModelIdentity,
        counters: SchedulerCounters,
        longest: int,
    ) -> None:
        """longest: tokens of the longest prompt that SGLang takes."""
        self._pool = pool
        self._filler = filler
        self._leases = leases
        self._memory = memory
        self._shelf = shelf
        self._geometry = geometry
        self._identity = identity
        self._counters = counters
        self._longest = longest

    def drop(self, request: LinkReq) -> None:
        for handle in request.handles.values():
            self._memory.drop(handle)

    def failed(self, reason: str) -> Answer:
        return fallback(reason)

    def count(self, positions: int, forwards: int) -> None:
        self._counters.document_batches += forwards
        self._counters.inline_positions += positions

    def open(self, request: LinkReq) -> OpenLink | Answer:
        """Finds the documents, takes what is here of the prompt, fills. The answer itself where that is all."""
        wanted = dict.fromkeys(request.documents)  # once each, however often they stand in the prompt
        absent = [key for key in wanted if key not in self._shelf and key not in request.handles]
        if absent:
            return {"status": ABSENT, "absent": absent, "broken": []}
        budget, phases = Budget(request.recompute, request.rho), Phases()
        with phases("take"):
            documents, broken = self._take(request)
        if broken:
            return {"status": ABSENT, "absent": broken, "broken": broken}
        with phases("locate"):
            by_key = dict(zip(request.documents, documents, strict=True))
            layout = laid_out(request.ids, by_key, request.documents, budget)
        total = len(layout.linked)
        if not layout.standing:
            return fallback("no document's tokens are a slice of the prompt's") | _told(layout)
        if total <= self._pool.page_size:
            return fallback("nothing to link: the prompt has no page before its last token") | _told(layout)
        if total > self._longest:
            return fallback(f"the linked prompt has {total} tokens, this worker takes {self._longest}") | _told(layout)
        base = Where(request.extra_key, request.cache_salt)
        where = Where(namespace_of(layout.standing, budget, base))
        ids, end = layout.ids, self._pool.page_floor(total - 1)
        if bool((layout.linked.tokens[end:] == SOFT).any()):
            reason = "soft entries of a document lie in the last page, which SGLang computes; use --page-size 1"
            return fallback(reason) | _told(layout)
        held = self._pool.match(ids[:end], where)
        with ExitStack() as keep:
            keep.enter_context(self._pool.locked(held))
            if held.length >= end:
                return self._answer(request, layout, where, held.node, held.length, 0, phases)
            known, usable = self._best(ids[:end], layout, budget, base)
            with self._pool.locked(known):
                tail = self._pool.tail(total, end)
                fresh = self._pool.allocate(self._pool.page_ceil(end + tail) - held.length)
                try:
                    start = max(held.length, usable)
                    copied = start - held.length
                    with phases("write"):
                        self._pool.copy(known.slots[held.length : start], fresh[:copied])
                    fill = self._filler.own_layers(self._pieces(layout.linked, start, end, fresh[copied:]), phases)
                    compute = layout.linked.plan.compute
                    inline = compute[(compute >= start) & (compute < end)]
                    chosen = torch.cat([inline, torch.arange(end, end + tail)])
                    if not len(chosen):
                        deque(fill, maxlen=0)  # no forward will advance it
                except Exception:
                    self._pool.free(fresh)
                    raise
            return OpenLink(
                request=request, tokens=torch.tensor(ids), held=held, fresh=fresh, chosen=chosen, tail=tail,
                fill=fill, phases=phases, keep=keep.pop_all(), layout=layout, where=where, end=end, cached=start,
            )  # fmt: skip

    def finish(self, one: OpenLink) -> Answer:
        """Inserts the prefix and takes the lease."""
        with one.phases("insert"):
            try:
                tail = one.part_with_tail(self._pool)
                node = self._pool.insert(one.tokens[: one.end].tolist(), one.where, one.held, one.fresh)
            except Exception:
                self._pool.free(one.fresh)
                raise
        filled = one.end - one.cached - int((one.chosen < one.end).sum())
        return self._answer(one.request, one.layout, one.where, node, one.cached, filled, one.phases, tail)

    def cached(self, request: ExportReq) -> Prefix:
        """The longest cached prefix of a prompt with these documents.

        That is the native one where a document is not on the shelf, none is found in the prompt, or soft entries stand
        between its tokens.
        """
        base = Where(cache_salt=request.cache_salt)
        native = self._pool.match(request.ids, base)
        documents = {key: held for key in request.documents if (held := self._shelf.get(key)) is not None}
        if len(documents) < len(set(request.documents)):
            return native
        budget = Budget(request.recompute, request.rho)
        layout = laid_out(request.ids, documents, request.documents, budget)
        if not layout.standing or len(layout.linked) != len(request.ids):
            return native
        inside = Where(namespace_of(layout.standing, budget, base))
        return max(native, self._pool.match(request.ids, inside), key=lambda one: one.length)

    def _take(self, request: LinkReq) -> tuple[list[Shelved], list[str]]:
        """The documents, in order; or the keys of blocks that came and are broken, or of another model."""
        came: dict[str, Shelved] = {}
        broken = []
        for key, handle in request.handles.items():
            try:
                came[key] = self._checked(self._memory.fetch(handle), request.contents[key])
            except KVLiftError:
                broken.append(key)
        if broken:
            for key, shelved in came.items():
                self._shelf.put(key, shelved)
            return [], broken
        documents = [came[key] if key in came else self._shelf.get(key) for key in request.documents]
        for key, shelved in came.items():
            self._shelf.put(key, shelved)
        return documents, []

    def _checked(self, block: KVBlock, ids: list[int]) -> Shelved:
        if (block.identity.model, block.geometry) != (self._identity.model, self._geometry):
            raise BlockError(f"the block is of model {block.identity.model[:12]}, not of this worker's")
        block.check_finite()
        # What was fetched lies in shared memory, which is for blocks on their way.
        own = replace(block, tokens=block.tokens.clone(), keys=block.keys.clone(), values=block.values.clone())
        document = document_of(own)
        if document.ids != ids:
            raise BlockError(f"the block is of another document of {len(document.ids)} tokens")
        return Shelved(document)

    def _best(self, ids: list[int], layout: Layout, budget: Budget, base: Where) -> tuple[Prefix, int]:
        """The longest prefix in a namespace that holds the same entries, and how much of it is good here."""
        best, usable = self._pool.nothing, 0
        for where, limit in ancestors(layout.standing, budget, base, len(ids)):
            found = self._pool.match(ids[:limit], where)
            if found.length > usable:
                best, usable = found, found.length
        return best, usable

    def _pieces(self, linked: Linked, start: int, end: int, slots: torch.Tensor) -> list[Piece]:
        """What of the documents lies in [start, end), and its slots, of which `slots` are those from `start` on."""
        pieces = []
        for one in linked.placed:
            first, last = max(one.start, start), min(one.stop, end)
            if first < last:
                part = one.document.block.span(first - one.start, last - one.start).to(self._pool.device)
                pieces.append(Piece(part, first, slots[first - start : last - start]))
        return pieces

    def _answer(
        self, request: LinkReq, layout: Layout, where: Where, node: Any, cached: int, filled: int, phases: Phases,
        tail: Tail | None = None,
    ) -> Answer:
        """Takes the lease. cached, linked and computed add up to the prompt."""
        assert where.namespace is not None
        total = len(layout.linked)
        leased = Leased.of(where.namespace, layout.ids[: self._pool.page_floor(total - 1)])
        self._leases.take(request.rid, node, leased, request.lease_s, tail)
        self._counters.prompts_linked += 1
        tokens = {"prompt": total, "cached": cached, "linked": filled, "computed": total - cached - filled}
        soft = len(layout.linked) != len(request.ids)
        return {
            "status": APPLIED, "reason": None, "namespace": where.namespace, "lease": request.rid,
            "tokens": {**tokens, "missed": layout.missed}, "starts": layout.starts,
            "input_ids": layout.ids if soft else None, "ms": dict(phases.ms),
        }  # fmt: skip


def _told(layout: Layout) -> Answer:
    """What a link that was not applied says of its tokens: all of them are computed."""
    total = len(layout.linked)
    tokens = {"prompt": total, "cached": 0, "linked": 0, "computed": total, "missed": layout.missed}
    return {"tokens": tokens, "starts": layout.starts}
