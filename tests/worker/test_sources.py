"""What is asked of a source, what comes of its answer, and that it is told when its block is not needed any more."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import BlockError, KVLiftError, TransferError
from sglang_ext.worker.bodies import LinkedDocuments, Source
from sglang_ext.worker.handover import unless_given_up
from sglang_ext.worker.sources import Collected, Sources
from sglang_ext.worker.transport import Carriers, SharedMemory
from sglang_ext.worker.transport.shared_memory import SameHost

LINKED = LinkedDocuments(("a",), 8)
OFFERED = {"tokens": 3, "transport": "far", "handle": "far-1", "bytes": 9, "ms": {"export": 1.0}}


class Far:
    """A carrier from another host, whose block comes, or does not."""

    name = "far"
    remote = True
    held_bytes = 0

    def __init__(self, fails: BaseException | None = None) -> None:
        self.fails = fails

    async def collect(self, handle: str, timeout_s: float) -> str:
        assert (handle, timeout_s) == ("far-1", 7.0)
        if self.fails is not None:
            raise self.fails
        return "near-1"


class FakeSource:
    """Answers /kv/export with `answer` and keeps what it was sent."""

    def __init__(self) -> None:
        self.answer: Any = OFFERED
        self.status = 200
        self.seen: list[tuple[str, dict[str, Any], str | None]] = []
        source = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                source.seen.append((self.path, body, self.headers["authorization"]))
                data = json.dumps(source.answer if self.path == "/kv/export" else {}).encode()
                self.send_response(source.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def released(self) -> list[dict[str, Any]]:
        return [body for path, body, _ in self.seen if path == "/kv/release"]


@pytest.fixture
def source() -> Iterator[FakeSource]:
    fake = FakeSource()
    threading.Thread(target=fake.server.serve_forever, daemon=True).start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def collect(source: FakeSource, *carriers: Any, salt: str | None = None, key: str | None = None) -> Collected:
    async def work() -> Collected:
        ours = Carriers(SharedMemory(1, Path("/dev/shm")), carriers)
        sources = Sources(ours)
        try:
            return await sources.collect(
                Source(url=source.url, api_key=key, cache_salt=salt), [1, 2, 3], True, 7.0, LINKED
            )
        finally:
            async with asyncio.timeout(10):  # what goes on beside the answer
                await asyncio.gather(*sources._releases)

    return asyncio.run(work())


def test_the_source_is_told_what_this_worker_takes_and_for_how_long(source: FakeSource):
    near = SameHost(SharedMemory(1, Path("/dev/shm")))
    collect(source, near, Far(), salt="tenant", key="secret")
    path, body, key = source.seen[0]
    assert path == "/kv/export" and key == "Bearer secret"
    place = SharedMemory(1, Path("/dev/shm")).place
    assert body == {
        "input_ids": [1, 2, 3], "cache_salt": "tenant", "keep_s": 7.0, "attention": True,
        "transports": ["shm", "far"], "place": place, "documents": ["a"], "recompute": 8,
    }  # fmt: skip


def test_a_block_from_another_host_is_released_at_its_source(source: FakeSource):
    got = collect(source, Far(), key="secret")
    assert (got.handle, got.transport, list(got.ms)) == ("near-1", "far", ["export", "collect"])
    assert source.released == [{"handle": "far-1"}]
    assert source.seen[-1][2] == "Bearer secret"


@pytest.mark.parametrize("failure", [TransferError("late"), BlockError("changed"), asyncio.CancelledError()])
def test_a_block_that_did_not_come_is_released_too(source: FakeSource, failure: BaseException):
    """Case 38."""
    with pytest.raises(type(failure)):
        collect(source, Far(failure))
    assert source.released == [{"handle": "far-1"}]


def test_a_block_in_shared_memory_needs_no_release(source: FakeSource):
    handle = f"kvlift-1-{'0' * 32}"
    source.answer = {**OFFERED, "transport": "shm", "handle": handle}
    got = collect(source, SameHost(SharedMemory(1, Path("/dev/shm"))))
    assert (got.handle, got.transport, got.ms) == (handle, "shm", {"export": 1.0})
    assert source.released == []


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        ({"tokens": 0}, 200, "holds no KV of this prompt"),
        ({"tokens": 0, "reason": "no room"}, 200, "no room"),
        ({**OFFERED, "transport": "pigeon"}, 200, "through 'pigeon'; this worker takes"),
        ({}, 500, "did not export"),
        ({}, 401, "did not export"),
    ],
)
def test_what_a_source_refuses_is_an_error_with_its_reason(source: FakeSource, answer: Any, status: int, reason: str):
    source.answer, source.status = answer, status
    with pytest.raises(TransferError, match=reason):
        collect(source, Far())
    assert source.released == []


@pytest.mark.parametrize(
    "answer", [[], {}, {"tokens": "many"}, {"tokens": 3}, {**OFFERED, "handle": 7}, {**OFFERED, "ms": 1}]
)
def test_an_answer_of_another_form_is_an_error(source: FakeSource, answer: Any):
    source.answer = answer
    with pytest.raises(KVLiftError, match="not an answer to /kv/export"):
        collect(source, Far())


def test_work_that_nobody_waits_for_goes_on_and_its_result_is_dropped():
    async def work() -> list[str]:
        go_on, dropped = asyncio.Event(), []

        async def slow() -> str:
            await go_on.wait()
            return "result"

        waiting = asyncio.create_task(unless_given_up(slow(), dropped.append))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert dropped == []
        go_on.set()
        for _ in range(3):
            await asyncio.sleep(0)
        return dropped

    assert asyncio.run(work()) == ["result"]
