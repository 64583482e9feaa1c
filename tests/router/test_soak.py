"""Mixed requests with random hang-ups: nothing is left in flight, and memory stays flat.

`KVLIFT_SOAK=20000` runs as many; the suite runs fewer.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random

import httpx
import psutil

from tests.router.conftest import MESSAGES
from tests.router.fake_worker import UNSURE, applied, until

COUNT = int(os.environ.get("KVLIFT_SOAK", "1000"))
AT_ONCE = 16
CONVERSATIONS = 40  # what the router remembers of each is bounded, and full long before the end
_REMEMBERED = 400  # objects of bounded memories that may still fill after the first quarter
_MOST_BYTES = 20e6


def body(chance: random.Random) -> dict:
    """One of the ways to ask."""
    ways = [{}, {"model": "small"}, {"model": "large"}, {"model": "always"}, {"kvlift": {"lift": "never"}}]
    said = [{"role": "user", "content": f"{chance.randrange(CONVERSATIONS)}"}]
    return {"model": "sure", "messages": said, "stream": chance.random() < 0.5, **chance.choice(ways)}


async def ask(client: httpx.AsyncClient, chance: random.Random) -> str:
    """One request, given up at a random moment by every third client."""
    patience = chance.choice([None, None, chance.random() * 0.05])
    request = client.build_request("POST", "/v1/chat/completions", json=body(chance))
    try:
        async with asyncio.timeout(patience):
            response = await client.send(request, stream=True)
            try:
                async for _ in response.aiter_bytes():
                    pass
            finally:
                await response.aclose()
    except TimeoutError:
        return "gone"
    return str(response.status_code)


async def soak(url: str, count: int, seed: int) -> dict[str, int]:
    chance = random.Random(seed)
    seen: dict[str, int] = {}
    left = iter(range(count))

    async def client_of_many() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in left:
                outcome = await ask(client, chance)
                seen[outcome] = seen.get(outcome, 0) + 1

    await asyncio.gather(*(client_of_many() for _ in range(AT_ONCE)))
    return seen


def ours(house) -> int:
    """How many objects of the router's own classes there are while no request runs."""
    until(lambda: house.gateway.idle and house.small.running == house.large.running == 0, 30)
    for worker in (house.small, house.large):
        for told in (worker.calls, worker.lifts, worker.checks, worker.headers, worker.connections):
            told.clear()
    gc.collect()
    homes = (str(type(each).__module__).partition(".")[0] for each in gc.get_objects())
    return sum(home in ("router", "policies") for home in homes)


def test_case_42_after_mixed_requests_and_hang_ups_nothing_is_left(build):
    house = build(breaker={"failures": 1000}, limits={"max_in_flight": 12, "max_calls": 4})
    house.small.script.words = ["word"] * 20
    house.large.script.lift = applied()
    house.small.script.logprob = UNSURE
    counts, bytes_held = [], []
    for quarter in range(4):
        seen = asyncio.run(soak(house.url, COUNT // 4, seed=quarter))
        assert set(seen) == {"200", "gone"} and sum(seen.values()) == COUNT // 4, seen
        counts.append(ours(house))
        bytes_held.append(psutil.Process().memory_info().rss)
    told = f"after each quarter of {COUNT}: objects {counts}, MB {[round(size / 1e6, 1) for size in bytes_held]}"
    print(told)
    assert counts[-1] - counts[0] < _REMEMBERED, told
    assert bytes_held[-1] - bytes_held[0] < _MOST_BYTES, told
    told = house.http.get("/ready").json()
    assert (told["in_flight"], told["waiting"]) == (0, 0)
    for tier in told["tiers"].values():
        assert tier["in_flight"] == 0
    assert house.ask(messages=MESSAGES).status_code == 200
