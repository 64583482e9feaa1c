"""The lift: from a source block to a repaired, published prefix in this worker's tree."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import KVLiftError, PackError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import digest_fields
from sglang_ext.phases import Phases
from sglang_ext.plan import Fill, FillKind, PrefillPlan, repaired
from sglang_ext.rope import Rotation
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import Budget, budget_of, scorer_named, top_positions
from sglang_ext.worker.executor import SGLangExecutor, Work
from sglang_ext.worker.leases import Leases
from sglang_ext.worker.messages import LiftReq
from sglang_ext.worker.pool import Pool, Prefix, Where
from sglang_ext.worker.transport import Transport

logger = logging.getLogger(__name__)

APPLIED = "applied"
FALLBACK = "fallback_prefill"


def namespace_of(pack_digest: str, selector: str, budget: Budget, cache_salt: str | None) -> str:
    """Where KV lifted in this way lives. Never shared with native KV, another method or another salt."""
    fields = [pack_digest, repr(budget), selector, "salted" if cache_salt else "", cache_salt or ""]
    return "kvlift:" + digest_fields(fields)


@dataclass
class _Open:
    """A lift between its fill and its insert. `keep` holds the lock on `held` until it is closed."""

    request: LiftReq
    where: Where
    held: Prefix
    fresh: torch.Tensor
    plan: PrefillPlan
    block_bytes: int
    scores: torch.Tensor
    phases: Phases
    keep: ExitStack

    @property
    def end(self) -> int:
        """Where the lifted prefix ends; SGLang's own batch computes what comes after it."""
        return self.plan.fills[-1].stop

    @property
    def chosen(self) -> torch.Tensor:
        """int64: the plan's positions to compute before the prefix is published."""
        return self.plan.compute[self.plan.compute < self.end]


class Lifter:
    """Runs lifts on one scheduler's pool."""

    def __init__(
        self,
        pool: Pool,
        executor: SGLangExecutor,
        leases: Leases,
        transport: Transport,
        packs: dict[str, Pack],
        geometry: KVGeometry,
    ) -> None:
        self._pool = pool
        self._executor = executor
        self._leases = leases
        self._transport = transport
        self._packs = packs
        self._geometry = geometry
        self._rotation = Rotation(geometry.rope, pool.device)

    def run(self, requests: Sequence[LiftReq]) -> list[dict[str, Any]]:
        """Lifts all requests with one repair forward; one answer each, in order.

        A lift that fails gives its slots back and answers `fallback_prefill` with the reason; the
        others go on.
        """
        answers: list[dict[str, Any] | None] = [None] * len(requests)
        opened: dict[int, _Open] = {}
        for index, request in enumerate(requests):
            try:
                one = self._open(request)
            except Exception as error:
                answers[index] = _fallback(error)
                continue
            if isinstance(one, dict):
                answers[index] = one
            else:
                opened[index] = one
        self._repair(list(opened.values()), answers, list(opened))
        return [answer for answer in answers if answer is not None]

    def _open(self, request: LiftReq) -> _Open | dict[str, Any]:
        """Fetches, checks, fills. The answer itself where everything is in the tree already."""
        phases = Phases()
        pack = self._pack(request.pack)
        with phases("transfer"):
            block = self._fetch(request, pack)
        where = Where(namespace=request.namespace)
        end = self._pool.page_floor(min(len(block), len(request.ids) - 1))
        ids = request.ids[:end]
        held = self._pool.match(ids, where)
        native = self._pool.match(ids, Where(cache_salt=request.cache_salt))
        with ExitStack() as keep:
            keep.enter_context(self._pool.locked(held))
            if held.length >= end:
                if held.length:
                    self._leases.take(request.rid, held.node, request.namespace, request.lease_s)
                return _answer(request, held.length, 0, 0, block.nbytes, phases)
            with self._pool.locked(native):
                fresh = self._pool.allocate(end - held.length)
                try:
                    # Native KV of this prompt is exact and costs a copy; only what is left is lifted.
                    start = max(held.length, min(native.length, end))
                    copied = start - held.length
                    with phases("write"):
                        self._pool.copy(native.slots[held.length : start], fresh[:copied])
                    scores = self._fill(request, block.span(0, end), start, fresh[copied:], pack, phases)
                    with phases("score"):
                        budget = budget_of(request.rho, request.coverage)
                        plan = _plan(len(request.ids), start, end, top_positions(scores, budget).cpu())
                except Exception:
                    self._pool.free(fresh)
                    raise
            return _Open(request, where, held, fresh, plan, block.nbytes, scores, phases, keep.pop_all())

    def _fetch(self, request: LiftReq, pack: Pack) -> KVBlock:
        """The source's block, on the pool's device, once it is known to be of this prompt and this pack."""
        block = self._transport.fetch(request.handle)
        pack.check_source(block.identity, block.geometry)
        block.check_tokens(request.ids)
        block.check_finite()
        return block.to(self._pool.device)

    def _fill(
        self, request: LiftReq, span: KVBlock, start: int, slots: torch.Tensor, pack: Pack, phases: Phases
    ) -> torch.Tensor:
        """Writes the span from position `start` on, and scores all of it unless nothing is left to lift.

        The budget is a share of the prompt, whatever part of it is here already: content mostly comes
        after the template that prompts share, and a share of the rest alone would starve it.
        """
        if start == len(span):
            return torch.zeros(start, device=self._pool.device)
        scorer = scorer_named(request.selector)
        shape = (len(span) - start, self._geometry.kv_heads, self._geometry.head_dim)
        turn = self._rotation.at(torch.arange(start, len(span), device=self._pool.device))
        disagreement = []
        for layer, keys, values, outside in pack.maps.predict(span, phases):
            with phases("write"):
                self._pool.write(layer, slots, turn.rotate(keys[start:].view(shape)), values[start:].view(shape))
            disagreement.append(outside)
        return scorer(span, torch.stack(disagreement))

    def _repair(self, opened: list[_Open], answers: list[dict[str, Any] | None], order: list[int]) -> None:
        if not opened:
            return
        together = Phases()
        try:
            with together("recompute"):
                self._executor.compute([_work(one) for one in opened if len(one.chosen)])
        except Exception as error:
            for index, one in zip(order, opened):
                with one.keep:
                    self._pool.free(one.fresh)
                answers[index] = _fallback(error)
            return
        for index, one in zip(order, opened):
            one.phases.ms.update(together.ms)
            with one.keep:
                answers[index] = self._publish(one)

    def _publish(self, one: _Open) -> dict[str, Any]:
        request = one.request
        with one.phases("insert"):
            try:
                node = self._pool.insert(request.ids[: one.end], one.where, one.held, one.fresh)
            except Exception as error:
                self._pool.free(one.fresh)
                return _fallback(error)
            self._leases.take(request.rid, node, request.namespace, request.lease_s)
        prefix = len(one.plan.fills[0])
        answer = _answer(request, prefix, one.end - prefix, len(one.chosen), one.block_bytes, one.phases)
        if request.explain:
            answer["explain"] = {"positions": one.chosen.tolist(), "scores": one.scores.tolist()}
        return answer

    def _pack(self, digest: str) -> Pack:
        try:
            return self._packs[digest]
        except KeyError:
            raise PackError(f"pack {digest[:12]} is not loaded; this worker has {sorted(self._packs)}") from None


def _plan(length: int, start: int, end: int, ranked: torch.Tensor) -> PrefillPlan:
    """A prefix [0, start) that is here already, a lifted span [start, end), and what is computed of it."""
    fills = (Fill(0, start, FillKind.PREFIX), Fill(start, end, FillKind.MAPPED))
    return repaired(length, fills, ranked[ranked >= start])


def _work(one: _Open) -> Work:
    slots = torch.cat([one.held.slots, one.fresh])
    return Work(torch.tensor(one.request.ids)[one.chosen], one.chosen.to(slots.device), slots)


def _answer(
    request: LiftReq, prefix: int, lifted: int, recomputed: int, nbytes: int, phases: Phases
) -> dict[str, Any]:
    if prefix + lifted == 0:
        return {"status": FALLBACK, "reason": "nothing to lift: the prompt has less than one page before its last token"}
    return {
        "status": APPLIED,
        "reason": None,
        "tokens": {"prompt": len(request.ids), "prefix": prefix, "lifted": lifted, "recomputed": recomputed},
        "bytes": nbytes,
        "ms": dict(phases.ms),
    }


def _fallback(error: Exception) -> dict[str, Any]:
    return {"status": FALLBACK, "reason": explain(error)}


def explain(error: Exception) -> str:
    """The reason to answer with. A failure costs a native prefill, never the scheduler; one that
    kvlift did not raise itself is also logged in full."""
    if not isinstance(error, KVLiftError):
        logger.error("kvlift: an unexpected failure", exc_info=error)
    return f"{type(error).__name__}: {error}"
