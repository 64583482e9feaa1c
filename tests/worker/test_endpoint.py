"""A handler that is cancelled when its client hangs up, and only then."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from sglang_ext.worker.endpoint import while_connected


def request(messages: list[dict[str, Any]], then: asyncio.Event) -> Request:
    """A POST whose client sends `messages`, and hangs up when `then` is set."""
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if left:
            return left.pop(0)
        await then.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)


BODY = [
    {"type": "http.request", "body": b'{"a"', "more_body": True},
    {"type": "http.request", "body": b": 1}", "more_body": False},
]


def test_a_client_that_stays_gets_the_answer_and_its_body_is_read_whole():
    async def work() -> Any:
        async def handler(asked: Request) -> Any:
            return await asked.json()

        return await while_connected(handler)(request(BODY, asyncio.Event()))

    assert asyncio.run(work()) == {"a": 1}


def test_what_a_handler_raises_comes_through():
    async def work() -> None:
        async def handler(_asked: Request) -> Any:
            raise ValueError("bad")

        await while_connected(handler)(request(BODY, asyncio.Event()))

    with pytest.raises(ValueError, match="bad"):
        asyncio.run(work())


@pytest.mark.parametrize("outer", [False, True], ids=["hang-up", "cancelled from outside"])
def test_case_37_a_handler_is_cancelled_and_cleans_up(outer: bool):
    async def work() -> list[str]:
        seen, hangs_up, started = [], asyncio.Event(), asyncio.Event()

        async def handler(_asked: Request) -> Any:
            try:
                started.set()
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                seen.append("cleaned up")
                raise

        serving = asyncio.create_task(while_connected(handler)(request(BODY, hangs_up)))
        await started.wait()
        if outer:
            serving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await serving
            await asyncio.sleep(0)
        else:
            hangs_up.set()
            assert (await serving).status_code == 499
        return seen

    assert asyncio.run(work()) == ["cleaned up"]
