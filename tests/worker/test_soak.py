"""Case 61: mixed traffic for a while, and after each part of it both workers are as they were.

20 s here; KVLIFT_SOAK_S=600 for the ten minutes of the case, which `pytest -s` shows as a table.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from router import processes
from tests.worker.conftest import Fleet
from tests.worker.documents import by_text, chat, item, texts
from tests.worker.servers import Worker
from tests.worker.test_faults import generate_body, lift_body

SECONDS = float(os.environ.get("KVLIFT_SOAK_S", "20"))
PARTS = 5
AT_ONCE = 6
_KEEP_IDLE_S = 4.0  # under the 5 s after which a worker closes an idle connection: no request may meet the close
GROWTH = 1.15
"""Memory after the first part, which fills caches and buffers, may grow by this factor and no more."""


class Traffic:
    """Chats, prompts of all lengths, lifts through either transport, salts, documents, and clients that hang up."""

    def __init__(self, fleet: Fleet, prompt: Any) -> None:
        self._rng = random.Random(61)
        self._prompt = prompt
        self._items = [item(number, "6x1") for number in range(12)]
        self._small, self._targets = fleet.small, (fleet.large, fleet.paged)
        self.sent = 0

    async def run(self, seconds: float) -> None:
        workers = (self._small, *self._targets)
        limits = httpx.Limits(keepalive_expiry=_KEEP_IDLE_S)
        self._clients = {
            worker.name: httpx.AsyncClient(
                base_url=worker.url, headers=worker.client.headers, timeout=120, limits=limits
            )
            for worker in workers
        }
        deadline = time.monotonic() + seconds
        await asyncio.gather(*(self._user(deadline) for _ in range(AT_ONCE)))
        for client in self._clients.values():
            await client.aclose()

    async def _user(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            self.sent += 1
            try:
                async with asyncio.timeout(self._rng.choice([0.05, 0.3, 60, 60, 60])):
                    await self._rng.choice(
                        [self._chat, self._escalation, self._escalation, self._long_prompt, self._linked, self._document]
                    )()
            except TimeoutError:
                pass  # it hung up

    async def _chat(self) -> None:
        worker = self._rng.choice([self._small, self._targets[0]])
        body = {
            "model": f"{worker.name}-served", "messages": [{"role": "user", "content": f"Question {self._rng.random()}"}],
            "max_tokens": self._rng.choice([1, 20]), "stream": self._rng.random() < 0.5,
        }  # fmt: skip
        await self._post(worker, "/v1/chat/completions", body)

    async def _long_prompt(self) -> None:
        ids = self._prompt(self._rng.randrange(500, 3000), seed=self._rng.randrange(10**6))
        await self._post(self._rng.choice([self._small, *self._targets]), "/generate", generate_body(ids, 4))

    async def _escalation(self) -> None:
        ids = self._prompt(self._rng.randrange(2, 400), seed=self._rng.randrange(200))
        salt, target = self._rng.choice([None, "a", "b"]), self._rng.choice(self._targets)
        salted = {"cache_salt": salt} if salt else {}
        await self._post(self._small, "/generate", generate_body(ids, 4, **salted))
        body = lift_body(ids, self._small.url, rho=self._rng.choice([0.0, 0.3, 1.0]), **salted)
        body["source"].update(salted)
        lifted = await self._post(target, "/kv/lift", body)
        where = {"extra_key": lifted["namespace"]} if lifted.get("namespace") else salted
        await self._post(target, "/generate", generate_body(ids, self._rng.choice([1, 30]), **where))

    async def _linked(self) -> None:
        """A chat over a novel order of documents; the second worker's memory holds a few of them only."""
        asked, worker = self._rng.choice(self._items), self._rng.choice(self._targets)
        parts = [by_text(text) for text in texts(asked)]
        self._rng.shuffle(parts)
        body = chat(asked, parts, stream=self._rng.random() < 0.5, max_tokens=self._rng.choice([1, 20]))
        body["documents"] = {"recompute": self._rng.choice([0, 0, 3])}
        await self._post(worker, "/v1/chat/completions", {"model": f"{worker.name}-served", **body})

    async def _document(self) -> None:
        """One is added, linked, answered behind, and deleted."""
        worker = self._rng.choice(self._targets)
        ids = self._prompt(self._rng.randrange(1, 400), seed=self._rng.randrange(10**9))
        added = await self._post(worker, "/v1/documents", {"ids": ids, "method": "plain"})
        prompt = [*self._prompt(9, seed=self._rng.randrange(10**6)), *ids, 5]
        await self._post(worker, "/kv/link", {"input_ids": prompt, "documents": [added["id"]]})
        await self._post(worker, "/generate", generate_body(prompt, 4))
        gone = await self._clients[worker.name].delete(f"/v1/documents/{added['id']}")
        assert gone.status_code == 200, f"{worker.name}: {gone.status_code} {gone.text}"

    async def _post(self, worker: Worker, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = await self._clients[worker.name].post(path, json=body)
        assert reply.status_code == 200, f"{worker.name} {path}: {reply.status_code} {reply.text}"
        return reply.json() if not body.get("stream") else {}


def resident_mb(worker: Worker) -> float:
    """What the worker's processes hold of this machine's memory alone."""
    held = 0
    for process in processes.tree(worker.pid):
        try:
            held += process.memory_full_info().uss
        except psutil.NoSuchProcess:
            continue  # it has ended since
    return held / 1e6


def test_case_61_what_a_worker_holds_at_idle_is_flat(fleet: Fleet, prompt):
    workers = (fleet.small, fleet.large, fleet.paged)
    traffic = Traffic(fleet, prompt)
    memory: dict[str, list[float]] = {worker.name: [] for worker in workers}
    table = Table("part", "requests", *(f"{worker.name}, MB" for worker in workers), "held at idle")
    before = [worker.counters() for worker in workers]
    for part in range(PARTS):
        asyncio.run(traffic.run(SECONDS / PARTS))
        for worker in workers:
            worker.rest()  # no lease, slot, block or buffer
            memory[worker.name].append(resident_mb(worker))
        table.add_row(str(part + 1), str(traffic.sent), *(f"{memory[worker.name][-1]:.0f}" for worker in workers), "0")
    Console().print(table)
    for worker, counted in list(zip(workers, before, strict=True))[1:]:
        for key in ("lifts", "document_hits", "documents_compiled"):
            assert worker.counters()[key] > counted[key], f"{worker.name}: no {key}"
    for name, held in memory.items():
        assert held[-1] < held[0] * GROWTH, f"{name} grew: {held} MB"
