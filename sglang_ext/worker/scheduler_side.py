"""The plugin inside the scheduler process: exports at once, jobs together, a batch per step."""

from __future__ import annotations

import logging
import os
import time
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Iterable, Iterator

import torch

from sglang_ext.attention import LAST_QUERIES
from sglang_ext.block import KVBlock
from sglang_ext.errors import KVLiftError
from sglang_ext.geometry import KVGeometry
from sglang_ext.hub import local_folder
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.transfer.pack import Pack
from sglang_ext.worker.answers import explain
from sglang_ext.worker.checks import check_rope
from sglang_ext.worker.cost import CostModel
from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.documents.compiling import DocumentCompiler
from sglang_ext.worker.documents.linking import Linker
from sglang_ext.worker.documents.mapping import DocumentMapper
from sglang_ext.worker.documents.shelf import shelf_of
from sglang_ext.worker.documents.ways import ways_of
from sglang_ext.worker.executor import SGLangExecutor
from sglang_ext.worker.fill import Filler
from sglang_ext.worker.jobs import Jobs
from sglang_ext.worker.leases import Asked, Leases
from sglang_ext.worker.lifting import Lifter
from sglang_ext.worker.measure import alone, measure
from sglang_ext.worker.messages import (
    CompileReq,
    CountersReq,
    ExportReq,
    ForgetReq,
    HeldReq,
    KVReply,
    LiftReq,
    LinkReq,
    MapReq,
    ReleaseReq,
)
from sglang_ext.worker.ops import ops_on
from sglang_ext.worker.pool import Pool, Prefix
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.tails import Tail, Tails
from sglang_ext.worker.transport import SharedMemory
from sglang_ext.worker.turns import Turns

logger = logging.getLogger(__name__)

_PAUSE_S = 0.0005


class SchedulerSide:
    """Answers the plugin's messages in one scheduler. Made once, when SGLang builds its dispatcher."""

    def __init__(self, scheduler: Any, settings: WorkerSettings) -> None:
        folder = local_folder(scheduler.server_args.model_path, scheduler.server_args.revision)
        self.identity = ModelIdentity.from_folder(folder, scheduler.server_args.chat_template)
        self.geometry = KVGeometry.from_folder(folder)
        self._scheduler = scheduler
        self._pool = Pool(scheduler, self.geometry)
        self._ops = ops_on(self._pool.device, settings.kernels)
        self._rotation = Rotation(self.geometry.rope, self._pool.device)
        check_rope(scheduler.tp_worker.model_runner.model, self._rotation)
        self._transport = SharedMemory(settings.transfer_max_bytes)
        freed = self._transport.sweep()
        if freed:
            logger.info("kvlift: freed %d blocks that dead workers left in shared memory", freed)
        self._leases: Leases[Tail] = Leases(scheduler.tree_cache)
        self._turns = Turns(self._leases)
        self.counters = SchedulerCounters()
        self._tails = Tails(self._pool, self._leases, self.counters)
        chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._recompute_tokens = settings.recompute_tokens or chunk
        self._executor = SGLangExecutor(scheduler.tp_worker.model_runner, self.geometry, self._ops, chunk)
        filler, packs = Filler(self._pool, self.geometry, self._ops), self._usable_packs(settings)
        self._costs = self._measure(filler, packs) if packs else None
        lifter = Lifter(self._pool, self._leases, self._transport, packs, filler, self._costs, self.counters)
        self._shelf = shelf_of(settings.documents_bytes)
        self._linker = Linker(
            self._pool, filler, self._leases, self._transport, self._shelf, self.geometry, self.identity, self.counters,
            scheduler.max_req_input_len,
        )  # fmt: skip
        ways = ways_of(scheduler.tp_worker.model_runner.model, settings.documents_adapters, self.identity)
        compiler = DocumentCompiler(
            self._pool, self._ops, self.geometry, self.identity, self._shelf, self._transport, ways, self.counters
        )
        mapper = DocumentMapper(
            packs, self._ops, self.geometry, self.identity, self._shelf, self._transport, self._pool.device
        )
        openers = {LiftReq: lifter, LinkReq: self._linker, CompileReq: compiler, MapReq: mapper}
        most_at_once = scheduler.server_args.prefill_max_requests or None
        self._jobs = Jobs(self._pool, self._executor, openers, most_at_once)

    def routes(self) -> list[tuple[type, Any]]:
        """Message types and their handlers, for SGLang's dispatcher."""
        return [
            (ExportReq, self.export), (LiftReq, self._jobs.queue), (LinkReq, self._jobs.queue),
            (CompileReq, self._jobs.queue), (MapReq, self._jobs.queue), (ForgetReq, self.forget), (ReleaseReq, self.release),
            (CountersReq, self.count), (HeldReq, self.held),
        ]  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether a job waits or is open: SGLang must not go to sleep, nor think its pool whole."""
        return self._jobs.busy

    @property
    def held_slots(self) -> int:
        """Slots that are neither free nor in the tree nor a request's."""
        return self._jobs.held_slots

    def export(self, request: ExportReq) -> KVReply:
        """Publishes the longest cached prefix of the request's ids, native or with its documents linked, as a block."""
        phases = Phases()
        try:
            with phases("export"), self._forward_stream():
                prefix = self._linker.cached(request)
                if prefix.length == 0:
                    return KVReply(rid=request.rid, body={"tokens": 0})
                ids = request.ids[: prefix.length]
                with self._pool.locked(prefix):
                    turn = self._rotation.at(torch.arange(prefix.length, device=self._pool.device))
                    keys, values = self._ops.read(self._pool.buffers, prefix.slots, turn)
                    attention = self._attention(ids, prefix) if request.attention else None
                block = KVBlock(torch.tensor(ids), keys, values, self.geometry, self.identity, attention)
                handle = self._transport.publish(block)
        except Exception as error:
            return KVReply(rid=request.rid, body={"tokens": 0, "reason": explain(error)})
        self.counters.exported_bytes += block.nbytes
        body = {"tokens": len(block), "handle": handle, "bytes": block.nbytes, "ms": phases.ms}
        return KVReply(rid=request.rid, body=body)

    def release(self, request: ReleaseReq) -> None:
        """Drops a lease, or a job that its client no longer waits for, or the block that it has just published."""
        self._jobs.drop(request.lease)
        self._transport.withdraw(request.lease)
        self._leases.release(request.lease)

    def forget(self, request: ForgetReq) -> None:
        """Drops a document's block."""
        self._shelf.drop(request.key)

    def count(self, request: CountersReq) -> KVReply:
        """The counters' values."""
        return KVReply(rid=request.rid, body=asdict(self.counters))

    def held(self, request: HeldReq) -> KVReply:
        """What is held for work under way: all 0 at rest."""
        body = {"leases": len(self._leases), "job_slots": self._jobs.held_slots, "used_slots": self._pool.used}
        return KVReply(rid=request.rid, body=body)

    def step(self) -> None:
        """Once per scheduler step: expire leases, take the jobs on where it is their turn, answer those that have ended.

        While requests run, jobs compute a limited number of positions a step, so that decodes wait no longer
        for a job than for one chunk of a native prefill. The map of a lift is not divided.
        """
        if len(self._leases):
            self._leases.tick(_asked(self._scheduler.waiting_queue))
        if not self._jobs.busy:
            return
        if not self._turns.jobs_may_run:
            if not self._others_run():
                time.sleep(_PAUSE_S)  # the cores are for those that bring the awaited requests
            return
        with self._turns.of_jobs(), self._forward_stream():
            ended = self._jobs.advance(self._recompute_tokens if self._others_run() else None)
        for request, answer in ended:
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)

    def before_batch(self, batch: Any) -> None:
        """Looks at a batch of SGLang's (ScheduleBatch) that is about to run."""
        self.counters.count_batch(batch)
        if batch.forward_mode.is_extend() and len(self._leases):
            self._leases.arrived(_asked(batch.reqs))
        self._tails.expect(batch)

    def known_outcome(self, batch: Any) -> Any | None:
        """What the forward of a batch (ForwardBatch) would give, where a job has run its tokens already; else None."""
        return self._tails.outcome(batch)

    def before_flush(self) -> None:
        """Leases and open jobs must not outlive the tree that they lock."""
        self._leases.release_all()
        for request in self._jobs.drop_all():
            answer = self._jobs.refusal(request, "the worker's cache was flushed")
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)

    def describe(self) -> dict[str, Any]:
        """What the HTTP process reports of this scheduler."""
        return {
            "pid": os.getpid(),
            "identity": self.identity.to_json(),
            "geometry": self.geometry.to_json(),
            "page_size": self._pool.page_size,
            "kernels": self._ops.name,
            "kv_dtype": str(self._pool.dtype),
            "costs": None if self._costs is None else self._costs.model_dump(),
        }

    def _attention(self, ids: list[int], prefix: Prefix) -> torch.Tensor:
        # Whatever the queries' forward writes goes to slots of its own: the prefix may be in use.
        with self._pool.borrowed(min(LAST_QUERIES, len(ids))) as scratch:
            return self._executor.attention_received(torch.tensor(ids), prefix.slots, scratch)

    def _others_run(self) -> bool:
        """Whether SGLang has requests under way that have not finished."""
        batches = (self._scheduler.running_batch, self._scheduler.last_batch)
        return any(not request.finished() for batch in batches if batch is not None for request in batch.reqs)

    def _measure(self, filler: Filler, packs: dict[str, Pack]) -> CostModel:
        limit = self._scheduler.max_req_input_len
        with alone(), torch.no_grad(), self._forward_stream():
            costs = measure(self._pool, self._executor, self._transport, filler, packs, limit)
        logger.info("kvlift: measured costs, in ms: %s", costs.model_dump())
        return costs

    def _usable_packs(self, settings: WorkerSettings) -> dict[str, Pack]:
        packs = {}
        for folder in settings.packs:
            pack = Pack.load(folder, str(self._pool.device))
            pack.check_target(self.identity, self.geometry)
            try:
                pack.manifest.check_accepted(settings.acceptance_threshold, settings.allow_bench_pack)
            except KVLiftError as error:
                logger.warning("kvlift: the lift stays off for pack %s: %s", folder, error)
                continue
            packs[pack.digest] = pack
        return packs

    @contextmanager
    def _forward_stream(self) -> Iterator[None]:
        """On a GPU, SGLang's forward stream, in order behind what the scheduler has launched."""
        scheduler = self._scheduler
        if self._pool.device.type == "cpu" or not scheduler.enable_overlap:
            yield
            return
        with scheduler.forward_stream_ctx:
            scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
            yield


def _asked(requests: Iterable[Any]) -> list[Asked]:
    """Of SGLang's requests (Req)."""
    return [Asked(request.extra_key, request.origin_input_ids) for request in requests]
