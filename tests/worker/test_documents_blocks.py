"""A compiled document on its way to the storage is nobody's leftover, whenever its client hangs up."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_ext.documents.record import DocumentRecord
from sglang_ext.worker.documents.blocks import Blocks
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import SharedMemory
from tests.worker.blocks import random_block


class Compiles:
    """A scheduler that has compiled the document at once."""

    def __init__(self, handle: str) -> None:
        self._handle = handle

    async def ask(self, *_: object) -> dict[str, object]:
        return {"status": "applied", "reason": None, "tokens": 3, "bytes": 1, "handle": self._handle, "ms": {}}


def test_a_client_that_hangs_up_before_a_thread_is_free_leaves_no_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    memory = SharedMemory(1 << 20, tmp_path)
    handle = memory.publish(random_block(3))
    settings = WorkerSettings(documents_store=str(tmp_path / "store"))
    blocks = Blocks(Compiles(handle), memory, None, None, settings, None)
    monkeypatch.setattr(Blocks, "key", lambda *_: "key")
    record = DocumentRecord.of("text", [1, 2, 3], "plain", None, "tokenizer", None)
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
