"""The plugin inside the scheduler process: exports at once, lifts together once per step."""

from __future__ import annotations

import logging
import os
from contextlib import contextmanager
from typing import Any, Iterator

from sglang_ext.block import KVBlock
from sglang_ext.errors import KVLiftError
from sglang_ext.geometry import KVGeometry
from sglang_ext.hub import local_folder
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.worker.checks import check_rope
from sglang_ext.transfer.pack import Pack
from sglang_ext.worker.executor import SGLangExecutor
from sglang_ext.worker.leases import Leases
from sglang_ext.worker.lifting import FALLBACK, Lifter, explain
from sglang_ext.worker.messages import ExportReq, KVReply, LiftReq, ReleaseReq
from sglang_ext.worker.pool import Pool, Where
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
        self._rotation = Rotation(self.geometry.rope, self._pool.device)
        check_rope(scheduler.tp_worker.model_runner.model, self._rotation)
        self._transport = SharedMemory(settings.transfer_max_bytes)
        self._leases = Leases(scheduler.tree_cache)
        self._lifter = Lifter(
            self._pool,
            SGLangExecutor(scheduler.tp_worker.model_runner, scheduler.chunked_prefill_size or scheduler.max_prefill_tokens),
            self._leases,
            self._transport,
            self._usable_packs(settings),
            self.geometry,
        )  # fmt: skip
        self._queued: list[LiftReq] = []
        freed = self._transport.sweep()
        if freed:
            logger.info("kvlift: freed %d blocks that dead workers left in shared memory", freed)

    def routes(self) -> list[tuple[type, Any]]:
        """Message types and their handlers, for SGLang's dispatcher."""
        return [(ExportReq, self.export), (LiftReq, self.queue), (ReleaseReq, self.release)]

    def export(self, request: ExportReq) -> KVReply:
        """Publishes the longest cached native prefix of the request's ids as a block."""
        phases = Phases()
        try:
            with phases("export"), self._forward_stream():
                prefix = self._pool.match(request.ids, Where(cache_salt=request.cache_salt))
                if prefix.length == 0:
                    return KVReply(rid=request.rid, body={"tokens": 0})
                with self._pool.locked(prefix):
                    keys, values = self._pool.read(prefix.slots)
                block = KVBlock.from_rotated(
                    request.ids[: prefix.length], keys, values, self._rotation, self.geometry, self.identity
                )
                handle = self._transport.publish(block)
        except Exception as error:
            return KVReply(rid=request.rid, body={"tokens": 0, "reason": explain(error)})
        body = {"tokens": len(block), "handle": handle, "bytes": block.nbytes, "ms": phases.ms}
        return KVReply(rid=request.rid, body=body)

    def queue(self, request: LiftReq) -> None:
        """Keeps a lift for this step's joint repair; it is answered at the end of `step`."""
        self._queued.append(request)

    def release(self, request: ReleaseReq) -> None:
        """Drops a lease, or a lift that its client no longer waits for."""
        dropped = [lift for lift in self._queued if lift.rid == request.lease]
        self._queued = [lift for lift in self._queued if lift.rid != request.lease]
        for lift in dropped:
            self._transport.drop(lift.handle)
        self._leases.release(request.lease)

    def step(self) -> None:
        """Once per scheduler step: expire leases, run every queued lift, answer."""
        self._leases.tick(request.extra_key for request in self._scheduler.waiting_queue)
        if not self._queued:
            return
        queued, self._queued = self._queued, []
        with self._forward_stream():
            answers = self._lifter.run(queued)
        for request, answer in zip(queued, answers, strict=True):
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)

    def before_flush(self) -> None:
        """Leases must not outlive the tree they lock."""
        self._leases.release_all()
        for request in self._queued:
            self._transport.drop(request.handle)
            answer = {"status": FALLBACK, "reason": "the worker's cache was flushed"}
            self._scheduler.send_control_output(KVReply(rid=request.rid, body=answer), request)
        self._queued = []

    def describe(self) -> dict[str, Any]:
        """What the HTTP process reports of this scheduler."""
        return {
            "pid": os.getpid(),
            "identity": self.identity.to_json(),
            "geometry": self.geometry.to_json(),
            "page_size": self._pool.page_size,
        }

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
