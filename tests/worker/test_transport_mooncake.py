"""Blocks through Mooncake's real engine over loopback: right bytes, good for one fetch, bounded, nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from sglang_ext.block import KVBlock
from sglang_ext.errors import BlockError, TransferError
from sglang_ext.worker.transport import SharedMemory
from sglang_ext.worker.transport.engine import Engine
from sglang_ext.worker.transport.mooncake import Mooncake, Ticket
from tests.worker.blocks import random_block, same
from tests.worker.servers import free_port

pytest.importorskip(
    "mooncake.engine", exc_type=ImportError, reason="Mooncake, or Debian's libibverbs1, is not installed"
)

BUFFER = 1 << 20
PATIENCE_S = 20.0
T = TypeVar("T")


class End:
    """One worker's end: its shared memory and its carrier."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.memory = SharedMemory(BUFFER, folder)
        self.engine = Engine("127.0.0.1", "tcp", "", BUFFER, timeout_s=1.0)
        self.carrier = Mooncake(self.memory, self.engine)

    async def offer(self, block: KVBlock) -> str:
        return await self.carrier.offer(self.memory.publish(block))

    async def collect(self, handle: str) -> KVBlock:
        return self.memory.fetch(await self.carrier.collect(handle, PATIENCE_S))

    def at_rest(self) -> bool:
        return self.carrier.held_bytes == 0 and list(self.folder.iterdir()) == []


Ends = tuple[End, End]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Ends:
    folder = tmp_path_factory.mktemp("ends")
    return End(folder / "source"), End(folder / "target")


@pytest.fixture
def ends(started: Ends):
    yield started
    assert all(end.at_rest() for end in started)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def run(work: Callable[[], Awaitable[T]]) -> T:
    return asyncio.run(work())


@pytest.mark.parametrize("attention", [False, True])
def test_a_block_arrives_as_it_was_and_its_handle_is_spent_once_it_is_released(ends: Ends, attention: bool):
    source, target = ends
    block = random_block(200, attention)

    async def work() -> None:
        handle = await source.offer(block)
        assert same(await target.collect(handle), block)
        assert source.carrier.held_bytes > block.nbytes and target.at_rest()
        source.carrier.drop(handle)
        assert source.at_rest()
        with pytest.raises(TransferError, match="is gone"):
            await target.collect(handle)
        source.carrier.drop(handle)  # harmless

    run(work)


def test_many_blocks_at_once_are_not_mixed_up(ends: Ends):
    source, target = ends
    blocks = [random_block(tokens) for tokens in (1, 700, 3, 150, 64, 400, 2, 333)]

    async def one(block: KVBlock) -> None:
        handle = await source.offer(block)
        assert same(await target.collect(handle), block)
        source.carrier.drop(handle)

    async def work() -> None:
        await asyncio.gather(*(one(block) for block in blocks for _ in range(2)))

    run(work)


def test_a_full_buffer_refuses_at_either_end_and_the_block_is_freed(ends: Ends):
    source, target = ends
    block = random_block(2500)  # more than half of a buffer

    async def work() -> None:
        first, theirs = await source.offer(block), await target.offer(block)
        for refused in (source.offer(block), target.collect(first)):
            with pytest.raises(TransferError, match="no room for a block"):
                await refused
        source.carrier.drop(first)
        target.carrier.drop(theirs)
        second = await source.offer(block)
        assert same(await target.collect(second), block)
        source.carrier.drop(second)

    run(work)


def test_a_block_that_changed_on_its_way_is_refused(ends: Ends):
    source, target = ends

    async def work() -> None:
        handle = await source.offer(random_block(50))
        source.engine.buffer[Ticket.parse(handle).address - source.engine.address + 4000] ^= 1
        with pytest.raises(BlockError, match=r"from 127\.0\.0\.1:\d+ was changed on its way"):
            await target.carrier.collect(handle, PATIENCE_S)
        source.carrier.drop(handle)

    run(work)


def test_a_late_reader_never_gets_the_next_block_in_the_same_place(ends: Ends):
    source, target = ends
    block = random_block(50)

    async def work() -> None:
        early = await source.offer(block)
        source.carrier.drop(early)
        late = await source.offer(block)
        assert Ticket.parse(early).address == Ticket.parse(late).address
        with pytest.raises(TransferError, match="is gone"):
            await target.collect(early)
        source.carrier.drop(early)  # does not free what is not its own
        assert same(await target.collect(late), block)
        source.carrier.drop(late)

    run(work)


@pytest.mark.parametrize("phase", ["read", "copy"])
def test_a_collect_that_is_given_up_frees_everything_in_the_end(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, phase: str
):
    """Case 38. Until the engine lets go of it, the part of the buffer is not given to another block."""
    source, target = ends
    reached, go_on = asyncio.Event(), asyncio.Event()
    read = target.engine.read

    async def slow_read(*where: object) -> None:
        if phase == "copy":
            await read(*where)
        reached.set()
        await go_on.wait()
        if phase == "read":
            await read(*where)

    monkeypatch.setattr(target.engine, "read", slow_read)

    async def work() -> None:
        handle = await source.offer(random_block(50))
        collecting = asyncio.create_task(target.carrier.collect(handle, PATIENCE_S))
        await reached.wait()
        collecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await collecting
        assert target.carrier.held_bytes > 0
        go_on.set()
        await until(target.at_rest)
        source.carrier.drop(handle)

    run(work)


def test_a_collect_over_its_time_is_refused_and_freed_in_the_end(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    source, target = ends
    go_on = asyncio.Event()
    monkeypatch.setattr(target.engine, "read", lambda *where: go_on.wait())

    async def work() -> None:
        handle = await source.offer(random_block(50))
        with pytest.raises(TransferError, match=r"did not come from 127\.0\.0\.1:\d+ within 0\.05 s"):
            await target.carrier.collect(handle, 0.05)
        assert target.carrier.held_bytes > 0
        go_on.set()
        await until(target.at_rest)
        source.carrier.drop(handle)

    run(work)


def test_an_offer_that_is_given_up_frees_everything(ends: Ends, monkeypatch: pytest.MonkeyPatch):
    source, _ = ends

    async def work() -> None:
        local = source.memory.publish(random_block(50))
        offering = asyncio.create_task(source.carrier.offer(local))
        await asyncio.sleep(0)
        offering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await offering
        await until(source.at_rest)

    run(work)


def test_a_source_that_is_not_there_is_an_error(ends: Ends):
    _, target = ends
    handle = str(Ticket(f"127.0.0.1:{free_port()}", 4096, 100, "0" * 32, bytes(16)))
    with pytest.raises(TransferError, match="cannot be reached"):
        run(lambda: target.carrier.collect(handle, PATIENCE_S))


def test_memory_that_the_source_did_not_register_is_not_read(ends: Ends):
    source, target = ends
    session, buffer = source.engine.session, source.engine.address
    for address in (buffer - 4096, buffer + BUFFER - 50):
        handle = str(Ticket(session, address, 100, "0" * 32, bytes(16)))
        with pytest.raises(TransferError, match="broke off"):
            run(lambda handle=handle: target.carrier.collect(handle, PATIENCE_S))


GOOD = str(Ticket("10.0.0.1:15000", 4096, 100, "0" * 32, bytes(16)))


@pytest.mark.parametrize(
    "handle",
    ["", "../x", f"kvlift-1-{'0' * 32}", GOOD + "0", GOOD[:-1], GOOD.replace("10.0.0.1:", ""), GOOD.replace("/100/", "/-1/"),
     GOOD.replace("10.0.0.1", "a b"), GOOD.replace("/1000/", "/0x1000/"), GOOD + "\n"],
)  # fmt: skip
def test_only_own_handles_are_taken(ends: Ends, handle: str):
    source, _ = ends
    assert source.carrier.owns(GOOD) and not source.carrier.owns(handle)
    with pytest.raises(TransferError, match="not a block handle"):
        run(lambda: source.carrier.collect(handle, PATIENCE_S))
    with pytest.raises(TransferError, match="not a block handle"):
        source.carrier.drop(handle)


def test_a_length_beyond_the_buffer_is_refused_before_anything_is_read(ends: Ends):
    source, _ = ends
    with pytest.raises(TransferError, match="no room"):
        run(lambda: source.carrier.collect(GOOD.replace("/100/", f"/{10**14}/"), PATIENCE_S))
