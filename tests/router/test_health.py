"""Which workers are up: hysteresis, isolation of probes, what follows for requests."""

from __future__ import annotations

import asyncio

import pytest

from router.breaker import Breaker
from router.config import Breaker as BreakerSettings
from router.config import Health, Limits, Tier
from router.errors import UpstreamError
from router.health import Monitor, WorkerHealth
from router.worker import Worker
from tests.router.conftest import contents
from tests.router.fake_worker import until


class Probed:
    """A worker whose probes follow a list: True is well, an exception is raised."""

    name = address = "w"
    why_no_lift = None

    def __init__(self, *outcomes):
        self.breaker = Breaker("w", BreakerSettings(failures=1))
        self.outcomes = list(outcomes)
        self.asked = 0

    async def healthy(self, timeout_s):
        self.asked += 1
        outcome = self.outcomes.pop(0) if self.outcomes else True
        if outcome is not True:
            raise outcome

    async def capabilities(self, timeout_s):
        raise UpstreamError("w", "upstream_404", "no such route")

    queued = capabilities


BAD = UpstreamError("w", "timeout", "no answer")


def states(*outcomes, **config):
    worker = Probed(*outcomes)
    health = WorkerHealth(worker, Health(**config))

    async def run():
        seen = []
        for _ in outcomes:
            await health.probe()
            seen.append(health.up)
        return seen

    return asyncio.run(run())


def test_case_69_three_misses_in_a_row_mark_a_worker_down_not_fewer():
    assert states(True, BAD, BAD, True, BAD, BAD, BAD, BAD, True) == [True] * 6 + [False, False, True]


def test_misses_is_configurable():
    assert states(True, BAD, misses=1) == [True, False]


def test_hits_in_a_row_mark_a_worker_up_again_not_fewer():
    seen = states(True, BAD, True, True, BAD, True, True, True, misses=1, hits=3)
    assert seen == [True, False, False, False, False, False, False, True]


def test_a_worker_that_comes_up_again_has_its_breaker_closed():
    worker = Probed(True, BAD, True, True)
    health = WorkerHealth(worker, Health(misses=1))

    async def run():
        seen = []
        for _ in range(4):
            worker.breaker.failed()
            await health.probe()
            seen.append(worker.breaker.state)
        return seen

    assert asyncio.run(run()) == ["closed", "open", "closed", "open"]


def test_a_worker_is_down_until_its_first_success():
    assert states(BAD, BAD, True) == [False, False, True]


@pytest.mark.parametrize("error", [BAD, RuntimeError("a bug"), ValueError("json")])
def test_case_70_one_probe_that_raises_stops_no_other(error):
    broken, well = Probed(*[error] * 100), Probed()
    broken.name, well.name = "broken", "well"

    async def run():
        monitor = Monitor([broken, well], Health(interval_s=0.01))
        task = asyncio.create_task(monitor.run())
        while well.asked < 3 or broken.asked < 3:
            await asyncio.sleep(0.01)
        assert not task.done()
        task.cancel()
        return monitor["well"].up, monitor["broken"].up

    assert asyncio.run(asyncio.wait_for(run(), 10)) == (True, False)


def test_timeout_s_bounds_a_probe():
    async def run():
        async def silent(reader, writer):
            await asyncio.sleep(60)

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tier = Tier(name="w", served="w", address=f"http://127.0.0.1:{port}")
        worker = Worker(tier, "w", tier.workers()[0], Limits(), BreakerSettings())
        with pytest.raises(UpstreamError, match="more than 0[.]1 s"):
            await worker.healthy(0.1)
        await worker.aclose()
        server.close()

    asyncio.run(asyncio.wait_for(run(), 10))


def test_case_27_and_69_a_small_worker_that_is_down_is_passed_over_until_it_is_back(build):
    house = build()
    house.small.script.health_status = 500
    until(lambda: house.http.get("/ready").status_code == 503)
    assert house.http.get("/ready").json()["tiers"]["small"]["up"] is False
    response, lines = house.stream()
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-reason"]) == ("large", "tier_down")
    assert contents(lines) == "large says so" and house.small.calls == []
    house.small.script.health_status = 200
    until(lambda: house.http.get("/ready").status_code == 200)
    assert house.ask().headers["x-kvlift-tier"] == "small"
