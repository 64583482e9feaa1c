"""Lifts beside other traffic: nobody's text changes, and no slot is lost."""

from __future__ import annotations

import asyncio
import random
import threading

import httpx

from tests.worker.conftest import Fleet
from tests.worker.servers import text


def test_lifts_during_running_decodes_change_no_other_text(fleet: Fleet, prompt):
    watched = [prompt(50, seed=60 + i) for i in range(3)]
    undisturbed = [text(fleet.large.generate(ids, tokens=60)) for ids in watched]
    fleet.large.flush()
    others = [prompt(80, seed=70 + i) for i in range(6)]
    for ids in others:
        fleet.small.generate(ids, tokens=1)
    seen: dict[int, list[int]] = {}

    def decode(index: int) -> None:
        seen[index] = text(fleet.large.generate(watched[index], tokens=60))

    threads = [threading.Thread(target=decode, args=(index,)) for index in range(len(watched))]
    for thread in threads:
        thread.start()
    for ids in others:
        lifted = fleet.large.lift(fleet.small, ids, "tiny-small-to-large")
        assert lifted["status"] == "applied"
        fleet.large.generate(ids, tokens=2, extra_key=lifted["namespace"])
    for thread in threads:
        thread.join()
    assert [seen[index] for index in range(len(watched))] == undisturbed


def test_200_lifts_with_aborts_and_a_flush_leak_nothing(fleet: Fleet, prompt):
    """Cases 38 to 40. SGLang's strict memory checks end a worker that has lost a slot."""
    rng = random.Random(0)
    prompts = [prompt(rng.randrange(2, 160), seed=100 + i) for i in range(25)]
    for ids in prompts:
        fleet.small.generate(ids, tokens=1)

    async def one(client: httpx.AsyncClient, ids: list[int]) -> str:
        body = {
            "input_ids": ids, "source": {"url": fleet.small.url}, "pack": "tiny-small-to-large", "when": "always",
            "rho": rng.choice([0.0, 0.3, 1.0]), "lease_s": rng.choice([0.05, 5.0]), "timeout_s": 60,
        }  # fmt: skip
        try:
            lifted = (await client.post("/kv/lift", json=body, timeout=rng.choice([0.03, 0.2, 60, 60]))).json()
            if "namespace" in lifted and rng.random() < 0.6:
                sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
                follow = {"input_ids": ids, "extra_key": lifted["namespace"], "sampling_params": sampling}
                await client.post("/generate", json=follow, timeout=rng.choice([0.05, 60]))
            return lifted["status"]
        except httpx.TimeoutException:
            return "aborted"

    async def all_of_them() -> list[str]:
        async with httpx.AsyncClient(base_url=fleet.large.url) as client:
            gate = asyncio.Semaphore(8)

            async def gated(number: int) -> str:
                async with gate:
                    if number == 100:
                        await client.post("/flush_cache", params={"timeout": 20}, timeout=60)
                    return await one(client, prompts[number % len(prompts)])

            return await asyncio.gather(*(gated(number) for number in range(200)))

    outcomes = asyncio.run(all_of_them())
    assert outcomes.count("applied") > 50 and outcomes.count("aborted") > 5, outcomes
    fleet.large.flush()
    assert fleet.large.alive()
    state = fleet.large.client.get("/get_server_info").json()["internal_states"][0]
    assert state["memory_usage"]["token_capacity"] > 0
