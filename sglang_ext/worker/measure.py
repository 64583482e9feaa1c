"""Times a few forwards, maps and transfers on this worker, before it serves, and fits the cost model to them."""

from __future__ import annotations

import fcntl
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Callable, Iterator

import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.transfer.pack import Pack
from sglang_ext.worker.cost import CostModel, ForwardCost, PackCost, keys_seen
from sglang_ext.worker.executor import SGLangExecutor, Work
from sglang_ext.worker.fill import Filler
from sglang_ext.worker.pool import Pool
from sglang_ext.worker.transport import Transport

LENGTHS = (16, 64, 256, 1024)
RECOMPUTED = 0.3
BLOCK_TOKENS = 256
LONGEST_MS = 5000.0
"""No length is tried whose prefill would take longer, going by the one before it: start-up must not wait for it."""
_REPEAT_BELOW_MS = 500.0
_ROUNDS, _ROUNDS_S = 5, 8.0
"""The lengths are tried again, so often at most and while this time lasts: other programs, which may be other workers
that start, only ever add to a forward, and a short one that was disturbed would make every lift look slow."""

LOCK, LOCK_WAIT_S = Path(tempfile.gettempdir()) / "kvlift-measure.lock", 60.0

Sample = tuple[int, int, float]
"""Tokens of a forward, keys that they see, milliseconds."""


def measure(
    pool: Pool, executor: SGLangExecutor, transport: Transport, filler: Filler, packs: dict[str, Pack], limit: int
) -> CostModel:
    """The costs of this worker, alone on its model. Needs a free pool; gives all slots back.

    packs: at least one, by digest; limit: the longest prompt that the worker takes.
    """
    native: list[Sample] = []
    recompute: list[Sample] = []
    began = time.perf_counter()
    for length in _lengths(min(limit, pool.capacity // 2), native):
        one, other = _forwards(pool, executor, length)
        native.append(one)
        recompute.append(other)
    for _ in range(1, _ROUNDS):
        for at, known in enumerate(native):
            if time.perf_counter() - began + known[2] / 1e3 > _ROUNDS_S:
                continue
            one, other = _forwards(pool, executor, known[0])
            native[at], recompute[at] = _quicker(native[at], one), _quicker(recompute[at], other)
    costs = {digest: _pack_cost(pool, filler, pack) for digest, pack in packs.items()}
    return CostModel(
        native=ForwardCost.fitted(native),
        recompute=ForwardCost.fitted(recompute),
        transfer_ms_per_byte=_transfer_ms_per_byte(pool, transport, next(iter(packs.values()))),
        packs=costs,
    )


@contextmanager
def alone(lock: Path = LOCK, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Inside, no other worker of this host measures. One that holds the lock for longer is not waited for."""
    with lock.open("w") as file:
        deadline = time.monotonic() + wait_s
        while not _locked(file) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _forwards(pool: Pool, executor: SGLangExecutor, length: int) -> tuple[Sample, Sample]:
    """A native prefill of that length, and the recompute of a share of its positions."""
    tokens = torch.arange(length) % 256  # ids that every vocabulary has
    positions = torch.arange(length)[:: round(1 / RECOMPUTED)]
    with pool.borrowed(length) as borrowed:
        slots = borrowed[:length]
        work = Work(tokens[positions], positions, slots)
        native_ms = _least_ms(lambda: executor.prefill(tokens, slots), pool.device)
        recompute_ms = _least_ms(lambda: executor.compute([work]), pool.device)
    seen = int(positions.sum()) + len(positions)
    return (length, keys_seen(length, length), native_ms), (len(positions), seen, recompute_ms)


def _quicker(one: Sample, other: Sample) -> Sample:
    return one if one[2] <= other[2] else other


def _lengths(limit: int, measured: list[Sample]) -> Iterator[int]:
    """At least two, and then as long as they are quick; `measured` grows in between."""
    for number, length in enumerate(LENGTHS):
        if length > limit and number >= 2:
            return
        if number >= 2 and measured[-1][2] * length / measured[-1][0] > LONGEST_MS:
            return
        yield min(length, limit)


def _pack_cost(pool: Pool, filler: Filler, pack: Pack) -> PackCost:
    block = _random_block(pack, pool)
    with pool.borrowed(len(block)) as slots:

        def fill() -> None:
            for _ in filler.layers(pack.maps, block, 0, slots[: len(block)], Phases()):
                pass

        ms = _least_ms(fill, pool.device)
    return PackCost(map_ms_per_token=ms / len(block), bytes_per_token=block.nbytes // len(block))


def _transfer_ms_per_byte(pool: Pool, transport: Transport, pack: Pack) -> float:
    block = _random_block(pack, pool)

    def transfer() -> None:
        transport.fetch(transport.publish(block)).to(pool.device)

    return _least_ms(transfer, pool.device) / block.nbytes


def _random_block(pack: Pack, pool: Pool) -> KVBlock:
    """A block of the pack's source, with values in this pool's dtype."""
    record = pack.manifest.source
    geometry = KVGeometry.from_json(record.geometry)
    length = min(BLOCK_TOKENS, pool.capacity // 2)
    keys, values = torch.randn(2, geometry.layers, length, geometry.kv_heads, geometry.head_dim, device=pool.device)
    identity = ModelIdentity(record.model, record.tokenizer, record.template)
    return KVBlock(torch.arange(length), keys, values.to(pool.dtype), geometry, identity)


def _least_ms(run: Callable[[], object], device: torch.device) -> float:
    """Of two runs, since the first one also warms up; a long one runs once. On a GPU one more comes before them."""
    if device.type == "cuda":
        run()  # compiles the kernels, which takes far longer than any run
    least = _ms(run, device)
    return least if least > _REPEAT_BELOW_MS else min(least, _ms(run, device))


def _ms(run: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - started) * 1e3
