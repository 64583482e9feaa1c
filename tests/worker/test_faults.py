"""Clients that hang up and sources that die, on real workers: whatever happens, both pools balance and nothing stays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.app import create_app
from router.config import Config
from tests.router.fake_worker import serving
from tests.worker.conftest import SMALL, Fleet, carried_by
from tests.worker.middleman import Middleman
from tests.worker.servers import Worker, cached, hang_up, text, until

PACK = "tiny-small-to-large"
ABORTS = int(os.environ.get("KVLIFT_ABORTS", "150"))
"""How many random aborts. The case says 1,000."""
LONG_ANSWER = 4000
"""Tokens: far more than anybody waits for here."""
SOON_S = 15.0
"""An abort frees what it held long before the answer would have ended by itself. SGLang looks every 4 s whether the
client of an answer that is not streamed is still there."""


@pytest.fixture(autouse=True)
def at_rest(fleet: Fleet) -> Iterator[None]:
    """Case 40: after each test, with no flush before it, no worker holds a lease, a slot, a block or a buffer."""
    yield
    for worker in fleet.all:
        worker.rest()


def lift_body(ids: list[int], url: str, **more: Any) -> dict[str, Any]:
    body = {"input_ids": ids, "source": {"url": url}, "pack": PACK, "when": "always", "lease_s": 0.5, "timeout_s": 60}
    return {**body, **more}


def generate_body(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        **more,
    }


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_hanging_up_on_an_answer_frees_its_slots(fleet: Fleet, prompt, phase: str, stream: bool):
    """Case 37."""
    ids = prompt(4000 if phase == "prefill" else 20, seed=400)

    def ready() -> None:
        if phase == "decode":
            until(lambda: fleet.large.held()["used_slots"] > len(ids) + 3)

    hang_up(fleet.large.url, "/generate", generate_body(ids, LONG_ANSWER, stream=stream), ready)
    fleet.large.rest(SOON_S)


@pytest.mark.parametrize("name", ["large", "paged"])
def test_hanging_up_between_export_and_read_frees_the_block_at_the_source(fleet: Fleet, prompt, name: str):
    """Case 38, through shared memory and through Mooncake."""
    target, ids = getattr(fleet, name), prompt(200, seed=401)
    fleet.small.generate(ids, tokens=1)
    exported, go_on = threading.Event(), threading.Event()

    def hold_back(_block: Path) -> None:
        exported.set()
        assert go_on.wait(60)

    with Middleman(fleet.small.url, hold_back) as between:
        body = lift_body(ids, between.url, timeout_s=3)
        hang_up(target.url, "/kv/lift", body, lambda: until(exported.is_set), target.api_key)
        go_on.set()
        fleet.small.rest(SOON_S)
        target.rest(SOON_S)


def test_hanging_up_in_the_repair_gives_the_lift_up(fleet: Fleet, prompt):
    """Cases 37 and 38: the lift is between two of its steps."""
    ids = prompt(1500, seed=402)
    fleet.small.generate(ids, tokens=1)
    before = fleet.paged.counters()
    with fleet.paged.decoding(prompt(20, seed=403)):
        hang_up(
            fleet.paged.url, "/kv/lift", lift_body(ids, fleet.small.url, rho=1.0),
            lambda: until(lambda: fleet.paged.counters()["recomputed_positions"] > before["recomputed_positions"]),
            fleet.paged.api_key,
        )  # fmt: skip
        until(lambda: fleet.paged.held()["job_slots"] == 0, SOON_S)
        assert fleet.paged.counters()["recomputed_positions"] - before["recomputed_positions"] < 1400
    assert fleet.paged.counters()["lifts_failed"] == before["lifts_failed"] + 1


@pytest.fixture(scope="module")
def cascade(fleet: Fleet) -> Iterator[str]:
    """The router before small and large."""
    tiers = [
        {"name": name, "served": f"{name}-served", "address": getattr(fleet, name).url} for name in ("small", "large")
    ]
    lift = {"pairs": [{"source": "small", "target": "large", "pack": PACK}], "when": "always", "lease_s": 0.5}
    config = Config.model_validate(
        {"tiers": tiers, "lift": lift, "policies": {"always": {"method": "always"}}, "default_policy": "always"}
    )
    app = create_app(config)
    with serving(app) as url:
        until(app.state.gateway.monitor.all_up)
        yield url


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["small", "large", "always"])
def test_hanging_up_at_the_router_frees_both_workers(fleet: Fleet, cascade: str, model: str, stream: bool):
    """Case 37: in the small decode, in the large one, and in the one after a lift."""
    decoding = fleet.small if model == "small" else fleet.large
    body = {
        "model": model, "messages": [{"role": "user", "content": "Where does Anna live?"}], "temperature": 0,
        "max_tokens": LONG_ANSWER, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    if model == "always":  # the small answer ends, the large one would not
        body["max_tokens"] = 400
    before = decoding.counters()["prefill_requests"]

    def ready() -> None:
        until(lambda: decoding.counters()["prefill_requests"] > before)

    hang_up(cascade, "/v1/chat/completions", body, ready)
    for worker in (fleet.small, fleet.large):
        worker.rest(SOON_S)


def test_random_aborts_leave_every_pool_whole(fleet: Fleet, prompt):
    """Cases 39 and 40. SGLang's strict checks end a worker whose pool does not balance."""
    rng = random.Random(39)
    prompts = [prompt(rng.randrange(2, 300), seed=410 + number) for number in range(20)]
    for ids in prompts:
        fleet.small.generate(ids, tokens=1)

    async def one(clients: dict[str, httpx.AsyncClient], ids: list[int]) -> str:
        worker = rng.choice(["small", "large", "paged"])
        follow: dict[str, Any] = {}
        try:
            if worker != "small" and rng.random() < 0.7:
                body = lift_body(ids, fleet.small.url, rho=rng.choice([0.0, 0.3, 1.0]), lease_s=rng.choice([0.05, 1.0]))
                lifted = (
                    await clients[worker].post("/kv/lift", json=body, timeout=rng.choice([0.01, 0.05, 0.3, 60]))
                ).json()
                follow = {"extra_key": lifted["namespace"]} if lifted.get("namespace") else {}
            stream = rng.random() < 0.5
            body = generate_body(ids, rng.choice([2, 64]), stream=stream, **follow)
            await clients[worker].post("/generate", json=body, timeout=rng.choice([0.01, 0.05, 0.2, 60]))
            return "answered"
        except httpx.TimeoutException:
            return "aborted"

    async def all_of_them() -> list[str]:
        gate = asyncio.Semaphore(8)
        clients = {
            worker.name: httpx.AsyncClient(base_url=worker.url, headers=worker.client.headers)
            for worker in (fleet.small, fleet.large, fleet.paged)
        }

        async def gated(number: int) -> str:
            async with gate:
                return await one(clients, prompts[number % len(prompts)])

        return await asyncio.gather(*(gated(number) for number in range(ABORTS * 3 // 2)))

    outcomes = asyncio.run(all_of_them())
    assert outcomes.count("aborted") > ABORTS // 2 and outcomes.count("answered") > 5, outcomes


def test_a_source_that_hangs_is_killed_or_is_dead_costs_a_native_prefill(fleet: Fleet, prompt, tmp_path: Path):
    """Case 41: in time, with a reason, with nothing left at either end, and with a right answer."""
    ids = prompt(200, seed=5)
    native = text(fleet.large.generate(ids))
    fleet.large.flush()
    doomed = Worker("doomed", SMALL, tmp_path, [], carried_by("mooncake"))
    try:
        doomed.wait()
        doomed.generate(ids, tokens=1)

        def lift(url: str, timeout_s: float) -> dict[str, Any]:
            return fleet.large.call("/kv/lift", **lift_body(ids, url, timeout_s=timeout_s))

        assert lift(doomed.url, 60)["status"] == "applied"
        fleet.large.flush()

        doomed.signal_scheduler(signal.SIGSTOP)
        hanging = lift(doomed.url, 1)
        assert hanging["status"] == "fallback_prefill" and "longer than 1.0 s" in hanging["reason"]
        doomed.signal_scheduler(signal.SIGCONT)
        doomed.rest()  # what it exported for nobody is gone too

        with Middleman(doomed.url, lambda _block: doomed.kill()) as between:
            killed = lift(between.url, 30)
        dead = lift(doomed.url, 30)
        assert killed["status"] == dead["status"] == "fallback_prefill", (killed, dead)
        assert "did not export" in dead["reason"]
        fleet.large.rest()
        answer = fleet.large.generate(ids)
        assert cached(answer) == 0 and text(answer) == native
    finally:
        doomed.stop()
