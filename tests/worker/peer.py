"""One end of Mooncake's carrier as a process of its own, for tests that kill it or put it on another host.

`python -m tests.worker.peer ADDRESS BUFFER_BYTES TIMEOUT_S` reads one JSON question a line and writes one JSON answer a
line, as they come to an end: {"id": 1, "do": "offer", "local": HANDLE} -> {"id": 1, "handle": ...}.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
import time
from itertools import count
from typing import Any, Sequence

from sglang_ext.errors import KVLiftError
from sglang_ext.worker.transport import SharedMemory
from sglang_ext.worker.transport.engine import Engine
from sglang_ext.worker.transport.mooncake import Mooncake

WAIT_S = 60.0


class Peer:
    """The peer seen from the test."""

    def __init__(self, address: str, buffer_bytes: int, timeout_s: float, inside: Sequence[str] = ()) -> None:
        """inside: begins its command line, for one in another network namespace."""
        arguments = [address, str(buffer_bytes), str(timeout_s)]
        # An engine in the test's own process has left its settings there.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MC_")}
        self.process = subprocess.Popen(
            [*inside, sys.executable, "-m", "tests.worker.peer", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1, env=environment,
        )  # fmt: skip
        self._ids = count()
        self._answers: dict[int, dict[str, Any]] = {}

    def send(self, do: str, **more: Any) -> int:
        """Asks, and does not wait. Returns the question's id."""
        number = next(self._ids)
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": number, "do": do, **more}) + "\n")
        self.process.stdin.flush()
        return number

    def answer(self, number: int) -> dict[str, Any]:
        """The answer to a question, whatever comes before it."""
        assert self.process.stdout is not None
        while number not in self._answers:
            ready, _, _ = select.select([self.process.stdout], [], [], WAIT_S)
            assert ready, f"the peer has not answered for {WAIT_S} s"
            line = self.process.stdout.readline()
            assert line, "the peer has ended"
            said = json.loads(line)
            self._answers[said["id"]] = said
        return self._answers.pop(number)

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        return self.answer(self.send(do, **more))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


async def serve(address: str, buffer_bytes: int, timeout_s: float) -> None:
    memory = SharedMemory(buffer_bytes)
    engine = Engine(address, "tcp", "", buffer_bytes, timeout_s)
    carrier = Mooncake(memory, engine)

    async def until_begun(_ask: dict[str, Any]) -> dict[str, Any]:
        """Until a collect has bytes in the buffer. The first part that is taken begins at its start."""
        while not any(engine.buffer[:16]):
            await asyncio.sleep(0.001)
        return {}

    async def until_freed(_ask: dict[str, Any]) -> dict[str, Any]:
        async with asyncio.timeout(WAIT_S):
            while carrier.held_bytes:
                await asyncio.sleep(0.01)
        return {}

    async def offer(ask: dict[str, Any]) -> dict[str, Any]:
        return {"handle": await carrier.offer(ask["local"])}

    async def collect(ask: dict[str, Any]) -> dict[str, Any]:
        started = time.monotonic()
        engine.buffer[:16] = bytes(16)
        local = await carrier.collect(ask["handle"], ask["timeout_s"])
        return {"local": local, "seconds": time.monotonic() - started}

    async def drop(ask: dict[str, Any]) -> dict[str, Any]:
        carrier.drop(ask["handle"])
        return {}

    async def held(_ask: dict[str, Any]) -> dict[str, Any]:
        return {"held": carrier.held_bytes}

    can = {do.__name__: do for do in (offer, collect, drop, held, until_begun, until_freed)}

    async def answered(ask: dict[str, Any]) -> None:
        try:
            said = await can[ask["do"]](ask)
        except KVLiftError as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": ask["id"], **said}), flush=True)

    loop = asyncio.get_running_loop()
    running = set()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = asyncio.create_task(answered(json.loads(line)))
        running.add(task)
        task.add_done_callback(running.discard)


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
