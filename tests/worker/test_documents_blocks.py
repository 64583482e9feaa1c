"""A compiled document on its way to the storage is nobody's leftover, whenever its client hangs up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.documents.record import DocumentRecord
from sglang_ext.worker.documents.blocks import Blocks
from sglang_ext.worker.messages import CompileReq, ReleaseReq
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import SharedMemory
from tests.worker.blocks import random_block


class Compiles:
    """A scheduler that has compiled the document at once."""

    def __init__(self, handle: str) -> None:
        self._handle = handle

    async def ask(self, *_: object) -> dict[str, object]:
        return {"status": "applied", "reason": None, "tokens": 3, "bytes": 1, "handle": self._handle, "ms": {}}


class TooLate:
    """A scheduler that publishes the compiled document just after the time to wait for it is over."""

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self.reached = asyncio.Event()
        self.over = asyncio.Event()

    async def ask(self, message: CompileReq, *_: object) -> dict[str, object]:
        self.reached.set()
        await self.over.wait()
        self._memory.publish(random_block(3), message.rid)
        raise TimeoutError

    def tell(self, message: ReleaseReq) -> None:
        self._memory.withdraw(message.lease)


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> DocumentRecord:
    monkeypatch.setattr(Blocks, "key", lambda *_: "key")
    return DocumentRecord.of("text", [1, 2, 3], "plain", None, "tokenizer", None)


@pytest.mark.parametrize("hangs_up", [False, True])
def test_an_answer_after_its_time_leaves_no_block(tmp_path: Path, record: DocumentRecord, hangs_up: bool):
    memory = SharedMemory(1 << 20, tmp_path)

    async def too_late() -> None:
        scheduler = TooLate(memory)
        blocks = Blocks(scheduler, memory, None, None, WorkerSettings(documents_store=str(tmp_path / "store")), None)
        compiling = asyncio.create_task(blocks.compile(record))
        await scheduler.reached.wait()
        if hangs_up:
            compiling.cancel()
            await asyncio.sleep(0)
        scheduler.over.set()
        with pytest.raises(asyncio.CancelledError if hangs_up else TimeoutError):
            await compiling
        await asyncio.sleep(0.01)

    asyncio.run(too_late())
    assert list(tmp_path.glob("kvlift-*")) == []


def test_a_client_that_hangs_up_before_a_thread_is_free_leaves_no_block(tmp_path: Path, record: DocumentRecord):
    memory = SharedMemory(1 << 20, tmp_path)
    handle = memory.publish(random_block(3))
    settings = WorkerSettings(documents_store=str(tmp_path / "store"))
    blocks = Blocks(Compiles(handle), memory, None, None, settings, None)
    freed = threading.Event()

    async def hang_up() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(freed.wait))
        compiling = asyncio.create_task(blocks.compile(record))
        for _ in range(10):
            await asyncio.sleep(0)
        compiling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await compiling
        left = list(tmp_path.glob("kvlift-*"))
        freed.set()
        await busy
        assert left == []

    asyncio.run(hang_up())
