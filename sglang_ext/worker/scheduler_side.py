"""The plugin inside the scheduler process: exports at once, lifts together, a batch per step."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Iterator

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
from sglang_ext.worker.answers import explain, fallback
from sglang_ext.worker.checks import check_rope
from sglang_ext.worker.cost import CostModel
from sglang_ext.worker.counters import SchedulerCounters
from sglang_ext.worker.executor import SGLangExecutor
from sglang_ext.worker.fill import Filler
from sglang_ext.worker.leases import Leases
from sglang_ext.worker.lifting import Lifter
from sglang_ext.worker.measure import measure
from sglang_ext.worker.messages import CountersReq, ExportReq, KVReply, LiftReq, ReleaseReq
from sglang_ext.worker.ops import ops_on
from sglang_ext.worker.pool import Pool, Prefix, Where
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import SharedMemory

logger = logging.getLogger(__name__)


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
        self._leases = Leases(scheduler.tree_cache)
        self.counters = SchedulerCounters()
        chunk = scheduler.chunked_prefill_size or scheduler.max_prefill_tokens
        self._recompute_tokens = settings.recompute_tokens or chunk
        self._executor = SGLangExecutor(scheduler.tp_worker.model_runner, self.geometry, self._ops, chunk)
        filler, packs = Filler(self._pool, self.geometry, self._ops), self._usable_packs(settings)
        self._costs = self._measure(filler, packs) if packs else None
        self._lifter = Lifter(
            self._pool, self._executor, self._leases, self._transport, packs, filler, self._costs, self.counters,
            scheduler.server_args.prefill_max_requests or None,
        )  # fmt: skip

    def routes(self) -> list[tuple[type, Any]]:
        """Message types and their handlers, for SGLang's dispatcher."""
        return [
            (ExportReq, self.export), (LiftReq, self._lifter.queue), (ReleaseReq, self.release),
            (CountersReq, self.count),
        ]  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether a lift waits or is open: SGLang must not go to sleep, nor think its pool whole."""
        return self._lifter.busy

    @property
    def held_slots(self) -> int:
        """Slots that are neither free nor in the tree nor a request's."""
        return self._lifter.held_slots

    def export(self, request: ExportReq) -> KVReply:
        """Publishes the longest cached native prefix of the request's ids as a block."""
        phases = Phases()
        try:
            with phases("export"), self._forward_stream():
                prefix = self._pool.match(request.ids, Where(cache_salt=request.cache_salt))
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
        """Drops a lease, or a lift that its client no longer waits for."""
        self._lifter.drop(request.lease)
        self._leases.release(request.lease)

    def count(self, request: CountersReq) -> KVReply:
        """The counters' values."""
        return KVReply(rid=request.rid, body=asdict(self.counters))

    def step(self) -> None:
        """Once per scheduler step: expire leases, take the lifts on, answer those that have ended.

        While requests run, lifts recompute a limited number of positions a step, so that decodes wait no longer
        for a lift than for one chunk of a native prefill. The map of a lift is not divided.
        """
        self._leases.tick(request.extra_key for request in self._scheduler.waiting_queue)
        if not self._lifter.busy:
            return
        with self._forward_stream():
            ended = self._lifter.advance(self._recompute_tokens if self._others_run() else None)
        for request, answer in ended:
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)

    def before_flush(self) -> None:
        """Leases and open lifts must not outlive the tree that they lock."""
        self._leases.release_all()
        for request in self._lifter.drop_all():
            answer = fallback("the worker's cache was flushed")
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)

    def describe(self) -> dict[str, Any]:
        """What the HTTP process reports of this scheduler."""
        return {
            "pid": os.getpid(),
            "identity": self.identity.to_json(),
            "geometry": self.geometry.to_json(),
            "page_size": self._pool.page_size,
            "kernels": self._ops.name,
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
        with torch.no_grad(), self._forward_stream():
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
