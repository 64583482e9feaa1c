"""Many streams at once: a worker that says when it sent each event, and a client that notes when each came.

Both are as thin as can be, so that a figure about the router is about the router.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

SERVED = "streams"


@dataclass(frozen=True)
class Order:
    """What one stream is asked for: so many events, with a pause before each."""

    name: str
    events: int
    pause_s: float

    def body(self, model: str) -> bytes:
        messages = [{"role": "user", "content": json.dumps(asdict(self))}]
        return json.dumps({"model": model, "messages": messages, "stream": True}).encode()


class Event(NamedTuple):
    """Seconds of the monotonic clock, which all processes of a machine share."""

    name: str
    number: int
    sent_at: float
    came_at: float

    @property
    def took_ms(self) -> float:
        return (self.came_at - self.sent_at) * 1000


async def worker(scope: Any, receive: Any, send: Any) -> None:
    """The worker, as an ASGI application."""
    if scope["type"] == "lifespan":
        while True:
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
    if scope["path"] != "/v1/chat/completions":
        status = 200 if scope["path"] == "/health" else 404
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    order = Order(**json.loads(json.loads(body)["messages"][-1]["content"]))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    for number in range(order.events):
        await asyncio.sleep(order.pause_s)
        said = f"{order.name} {number} {time.monotonic()!r}"
        await send({"type": "http.response.body", "body": _event({"content": said}), "more_body": True})
    await send({"type": "http.response.body", "body": _event({}, "stop") + b"data: [DONE]\n\n"})


async def ask(host: str, port: int, order: Order, model: str) -> list[Event]:
    """One stream, read to its end. Raises `AssertionError` where it does not end as it should."""
    reader, writer = await asyncio.open_connection(host, port)
    body = order.body(model)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    events: list[Event] = []
    finished = done = False
    try:
        status = await reader.readline()
        assert b" 200 " in status, f"{order.name}: {status!r} {await reader.read(2000)!r}"
        while not done:
            line = await reader.readline()
            came_at = time.monotonic()
            assert line, f"{order.name}: the stream broke off after {len(events)} events"
            if not line.startswith(b"data: "):  # a header, the size of a chunk, an empty line
                continue
            done = line == b"data: [DONE]\n"
            if not done:
                (choice,) = json.loads(line[len("data: ") :])["choices"]
                finished = finished or choice["finish_reason"] is not None
                if said := choice["delta"].get("content"):
                    name, number, sent_at = said.split(" ")
                    events.append(Event(name, int(number), float(sent_at), came_at))
    finally:
        writer.close()
    assert finished
    return events


async def ask_all(host: str, port: int, orders: list[Order], model: str, spread_s: float) -> list[list[Event]]:
    """All streams, their starts spread evenly over `spread_s` seconds; in the order of `orders`."""

    async def later(place: int, order: Order) -> list[Event]:
        await asyncio.sleep(spread_s * place / len(orders))
        return await ask(host, port, order, model)

    return await asyncio.gather(*(later(place, order) for place, order in enumerate(orders)))


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    told = {"id": "id", "object": "chat.completion.chunk", "created": 1, "model": SERVED, "choices": [choice]}
    return f"data: {json.dumps(told)}\n\n".encode()
