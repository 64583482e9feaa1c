"""A thousand streams at once: what the worker sent is what the clients get, event by event."""

from __future__ import annotations

import asyncio

import httpx

from router.app import create_app
from router.config import Config
from tests.router.fake_worker import serving, until
from tests.router.streams import SERVED, Order, ask_all, worker

STREAMS, EVENTS = 1000, 5


def test_no_event_of_a_thousand_concurrent_streams_is_lost_or_reordered():
    with serving(worker) as address:
        config = Config.model_validate(
            {
                "tiers": [{"name": "only", "served": SERVED, "address": address}],
                "policies": {"p": {"method": "never"}},
                "default_policy": "p",
                "limits": {"max_in_flight": STREAMS, "max_queue": 0},
                "health": {"timeout_s": 60},
            }
        )
        app = create_app(config)
        with serving(app) as url:
            gateway = app.state.gateway
            until(gateway.monitor.all_up)
            port = httpx.URL(url).port
            most = [0]
            orders = [Order(f"s{number}", EVENTS, 1.0) for number in range(STREAMS)]

            async def run():
                task = asyncio.create_task(ask_all("127.0.0.1", port, orders, SERVED, spread_s=1.0))
                while not task.done():
                    most[0] = max(most[0], gateway.admission.in_flight.count)
                    await asyncio.sleep(0.02)
                return await task

            answers = asyncio.run(asyncio.wait_for(run(), 300))
            until(lambda: gateway.idle)
    for order, events in zip(orders, answers, strict=True):
        assert [(event.name, event.number) for event in events] == [(order.name, n) for n in range(EVENTS)]
    assert most[0] > STREAMS / 2, "they did not run at once"
