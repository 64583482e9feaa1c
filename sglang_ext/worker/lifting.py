"""The lift: from a source block to a repaired, published prefix in this worker's tree.

A lift is a job (jobs.py): opening it fetches, checks, maps and scores; what is computed is the repair; its end is the
insert.
"""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any, Iterator

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import PackError
from sglang_ext.phases import Phases
from sglang_ext.plan import Fill, FillKind, PrefillPlan, repaired
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, budget_of, scorer_named, top_positions
from sglang_ext.worker.answers import Answer, applied, declined, explain, fallback
from sglang_ext.worker.cost import NATIVE, Choice, CostModel
from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.fill import Filler
from sglang_ext.worker.leases import Leased, Leases
from sglang_ext.worker.messages import ALWAYS, LiftReq
from sglang_ext.worker.opened import OpenLift
from sglang_ext.worker.pool import Pool, Where
from sglang_ext.worker.tails import Tail
from sglang_ext.worker.transport import Transport


class Lifter:
    """Opens and publishes lifts (jobs.py, `Opener`)."""

    def __init__(
        self,
        pool: Pool,
        leases: Leases[Tail],
        transport: Transport,
        packs: dict[str, Pack],
        filler: Filler,
        costs: CostModel | None,
        counters: SchedulerCounters,
    ) -> None:
        """costs: None where there is no pack to lift with."""
        self._pool = pool
        self._leases = leases
        self._transport = transport
        self._packs = packs
        self._filler = filler
        self._costs = costs
        self._counters = counters

    def drop(self, request: LiftReq) -> None:
        self._transport.drop(request.handle)

    def failed(self, reason: str) -> Answer:
        return fallback(reason)

    def count(self, positions: int, forwards: int) -> None:
        self._counters.lift_batches += forwards
        self._counters.recomputed_positions += positions

    def open(self, request: LiftReq) -> OpenLift | Answer:
        """Fetches, checks, fills. The answer itself where that is all, or where the lift is declined."""
        phases = Phases()
        pack = self._pack(request.pack)
        with phases("transfer"):
            block = self._fetch(request, pack)
        where = Where(namespace=request.namespace)
        end = self._pool.page_floor(min(len(block), len(request.ids) - 1))
        held = self._pool.match(request.ids[:end], where)
        native = self._pool.match(request.ids[:end], Where(cache_salt=request.cache_salt))
        choice = self._choose(request, native.length, held.length)
        if choice.chosen == NATIVE:
            return declined(choice)
        with ExitStack() as keep:
            keep.enter_context(self._pool.locked(held))
            if held.length >= end:
                if held.length:
                    self._lease(request, held.node, held.length)
                return applied(len(request.ids), held.length, 0, 0, block.nbytes, phases, choice)
            with self._pool.locked(native):
                tail = self._pool.tail(len(request.ids), end)
                fresh = self._pool.allocate(self._pool.page_ceil(end + tail) - held.length)
                try:
                    # Native KV of this prompt is exact and costs a copy; only what is left is lifted.
                    start = max(held.length, min(native.length, end))
                    copied = start - held.length
                    with phases("write"):
                        self._pool.copy(native.slots[held.length : start], fresh[:copied])
                    slots = fresh[copied : end - held.length]
                    scores, fill = self._score(request, block.span(0, end), start, slots, pack, phases)
                    with phases("score"):
                        budget = budget_of(request.rho, request.coverage)
                        plan = _plan(len(request.ids), start, end, top_positions(scores, budget).cpu())
                    chosen = plan.compute[plan.compute < end + tail]
                    if not len(chosen):
                        deque(fill, maxlen=0)  # no forward will advance it
                except Exception:
                    self._pool.free(fresh)
                    raise
            return OpenLift(
                request=request, tokens=torch.tensor(request.ids), held=held, fresh=fresh, chosen=chosen, tail=tail,
                fill=fill, phases=phases, keep=keep.pop_all(), where=where, plan=plan, block_bytes=block.nbytes,
                scores=scores, choice=choice,
            )  # fmt: skip

    def finish(self, one: OpenLift) -> Answer:
        """Inserts the prefix and takes the lease."""
        request = one.request
        with one.phases("insert"):
            try:
                tail = one.part_with_tail(self._pool)
                node = self._pool.insert(request.ids[: one.end], one.where, one.held, one.fresh)
            except Exception as error:
                self._pool.free(one.fresh)
                return fallback(explain(error))
            self._lease(request, node, one.end, tail)
        prefix = len(one.plan.fills[0])
        recomputed = one.chosen[one.chosen < one.end]
        counts = len(request.ids), prefix, one.end - prefix, len(recomputed)
        answer = applied(*counts, one.block_bytes, one.phases, one.choice)
        if request.explain:
            answer["explain"] = {"positions": recomputed.tolist(), "scores": one.scores.tolist()}
        return answer

    def _lease(self, request: LiftReq, node: Any, length: int, tail: Tail | None = None) -> None:
        leased = Leased.of(request.namespace, request.ids[:length])
        self._leases.take(request.rid, node, leased, request.lease_s, tail)

    def _fetch(self, request: LiftReq, pack: Pack) -> KVBlock:
        """The source's block, on the pool's device, once it is known to be of this prompt and this pack."""
        block = self._transport.fetch(request.handle)
        pack.check_source(block.identity, block.geometry)
        block.check_tokens(request.ids)
        block.check_finite()
        return block.to(self._pool.device)

    def _choose(self, request: LiftReq, cached: int, held: int) -> Choice:
        assert self._costs is not None, "a worker with a pack has measured its costs"
        budget = request.rho if request.coverage is None else request.coverage
        return self._costs.choose(request.pack, len(request.ids), budget, request.when == ALWAYS, cached, held)

    def _score(
        self, request: LiftReq, span: KVBlock, start: int, slots: torch.Tensor, pack: Pack, phases: Phases
    ) -> tuple[torch.Tensor, Iterator[torch.Tensor]]:
        """The scores of the whole span, unless nothing is left to lift, and the layers still to be written.

        The budget is a share of the prompt, whatever part of it is here already: content mostly comes
        after the template that prompts share, and a share of the rest alone would starve it.
        """
        if start == len(span):
            return torch.zeros(start, device=self._pool.device), iter(())
        scorer = scorer_named(request.selector)
        layers = self._filler.layers(pack.maps, span, start, slots, phases)
        if request.selector == RANK_DISAGREEMENT:
            return scorer(span, torch.stack(list(layers))), iter(())
        # The other selectors read no prediction: the repair maps each layer when it comes to it, or before.
        return scorer(span, torch.empty(0, len(span), device=self._pool.device)), layers

    def _pack(self, digest: str) -> Pack:
        try:
            return self._packs[digest]
        except KeyError:
            raise PackError(f"pack {digest[:12]} is not loaded; this worker has {sorted(self._packs)}") from None


def _plan(length: int, start: int, end: int, ranked: torch.Tensor) -> PrefillPlan:
    """A prefix [0, start) that is here already, a lifted span [start, end), and what is computed of it."""
    fills = (Fill(0, start, FillKind.PREFIX), Fill(start, end, FillKind.MAPPED))
    return repaired(length, fills, ranked[ranked >= start])
