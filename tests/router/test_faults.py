"""The sixteen kinds of fault that gateways are compared on: each ends in a right answer or a clean error.

One table of what the small worker does and how the request must end; other files hold the finer cases of each kind.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.router.conftest import contents, extension
from tests.router.fake_worker import UNSURE, applied, free_port, until

SMALL, LARGE, ERROR = "small says", "large says so", None


@dataclass(frozen=True)
class Kind:
    """`script`: what the small worker does. `ends`: the whole answer that the client gets, None for an error."""

    script: dict[str, Any] = field(default_factory=dict)
    ends: str | None = LARGE
    limits: dict[str, Any] = field(default_factory=dict)
    address: Callable[[], Any] | None = None
    code: str | None = None  # of the error


@contextmanager
def resetting() -> Iterator[str]:
    """A server that resets each connection once the request has begun to come."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(10)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def refusing() -> Iterator[str]:
    yield f"http://127.0.0.1:{free_port()}"


def after(words: int, fault: str) -> dict[str, Any]:
    return {"fault_after": words, "fault": fault}


STREAMED = {
    "refused": Kind(address=refusing),
    "reset": Kind(address=resetting),
    "4xx": Kind({"status": 400}, ERROR, code="upstream_400"),
    "429": Kind({"status": 429}),
    "5xx": Kind({"status": 500}),
    "timeout before the first token": Kind({"first_token_s": 30}, limits={"first_token_s": 0.2}),
    "timeout after the first token": Kind(after(1, "stall"), ERROR, {"total_s": 0.5}, code="total_timeout"),
    "slow first token": Kind({"first_token_s": 0.5}, SMALL, {"idle_s": 0.2}),
    "stall": Kind(after(1, "stall"), ERROR, {"idle_s": 0.2}, code="idle_timeout"),
    "cut before content": Kind(after(0, "cut")),
    "cut after content": Kind(after(1, "cut"), ERROR, code="connection_lost"),
    "bad JSON event": Kind(after(1, "bad_json"), ERROR, code="malformed"),
    "missing [DONE]": Kind({"send_done": False}, SMALL),
    "an end without a reason": Kind(after(1, "done"), ERROR, code="truncated"),
}
"""Fourteen; recovery and accounting, which take more than one request, follow below."""

BUFFERED = {
    "refused": STREAMED["refused"],
    "reset": STREAMED["reset"],
    "4xx": STREAMED["4xx"],
    "429": STREAMED["429"],
    "5xx": STREAMED["5xx"],
    "timeout": Kind({"first_token_s": 30}, limits={"attempt_s": 0.2}),
    "stall": Kind(after(1, "stall"), limits={"attempt_s": 0.2}),
    "slow": Kind({"first_token_s": 0.5}, SMALL),
}


@contextmanager
def failing(build, kind: Kind) -> Iterator[Any]:
    house = build(limits=kind.limits, health={"interval_s": 600})
    for key, value in kind.script.items():
        setattr(house.small.script, key, value)
    if kind.address is None:
        yield house
        return
    with kind.address() as address:
        house.gateway.monitor["small"].worker._client.base_url = address
        yield house


def error_of(told: dict[str, Any]) -> str | None:
    """The code of a clean error, in OpenAI's form; a worker's own 400 is handed on with a number for one."""
    error = told["error"]
    assert error["message"]
    return f"upstream_{error['code']}" if isinstance(error["code"], int) else error["code"]


@pytest.mark.parametrize("name", STREAMED)
def test_a_streamed_answer_is_right_or_ends_in_a_clean_error(build, name):
    kind = STREAMED[name]
    with failing(build, kind) as house:
        response, lines = house.stream(model="never")
        until(lambda: house.gateway.idle)
        assert len(house.small.calls) <= 1  # no retry, and none after content
    if response.status_code != 200:
        assert kind.ends is ERROR and error_of(response.json()) == kind.code
        return
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    reasons = [choice["finish_reason"] for event in events for choice in event.get("choices", [])]
    if kind.ends is ERROR:
        assert error_of(events[-1]) == kind.code
        assert "[DONE]" not in lines and not any(reasons)
        assert SMALL.startswith(contents(lines))
    else:
        assert contents(lines) == kind.ends
        assert lines[-1] == "[DONE]" and [reason for reason in reasons if reason] == ["stop"]


@pytest.mark.parametrize("name", BUFFERED)
def test_a_buffered_answer_is_right_or_a_clean_error(build, name):
    kind = BUFFERED[name]
    with failing(build, kind) as house:
        response = house.ask(model="never")
        until(lambda: house.gateway.idle)
        assert len(house.small.calls) <= 1
    if kind.ends is ERROR:
        assert response.status_code >= 400 and error_of(response.json()) == kind.code
    else:
        assert response.json()["choices"][0]["message"]["content"] == kind.ends


def test_recovery_after_an_outage(build, stream):
    house = build(breaker={"failures": 1, "interval_s": 600})
    house.small.script.status = house.small.script.health_status = 503
    assert house.ask(stream=stream).headers["x-kvlift-tier"] == "large"
    until(lambda: not house.gateway.monitor["small"].up)
    assert house.ask(stream=stream).headers["x-kvlift-reason"] == "tier_down"
    house.small.script.status = house.small.script.health_status = 200
    until(lambda: house.gateway.monitor["small"].up)
    assert house.ask(stream=stream).headers["x-kvlift-tier"] == "small"
    assert len(house.small.calls) == 2


@pytest.mark.parametrize("fault", [None, "status", "cut"])
def test_accounting_every_call_of_a_worker_is_in_a_record_and_usage_is_of_the_one_that_answered(build, fault):
    house = build(limits={"retries": 1}, breaker={"failures": 100})
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    if fault == "status":
        house.large.script.status, house.large.script.fail_times = 503, 1
    elif fault == "cut":
        house.small.script.fault_after, house.small.script.fault = 0, "cut"
    told, used = [], []
    for _ in range(5):
        _, lines = house.stream(stream_options={"include_usage": True})
        told.append(extension(lines))
        used.append(json.loads(lines[-2])["usage"])
    attempts = [attempt for record in told for attempt in record["attempts"]]
    assert sum(attempt["tier"] == "small" for attempt in attempts) == len(house.small.calls) == 5
    retried = int(fault == "status")
    assert sum(attempt["tier"] == "large" for attempt in attempts) == len(house.large.calls) - retried == 5
    assert {usage["completion_tokens"] for usage in used} == {len(house.large.script.words)}
    discarded = [attempt for attempt in attempts if attempt["outcome"] != "answered"]
    assert len(discarded) == 5 and all(attempt["tier"] == "small" for attempt in discarded)
    workers = house.http.get("/ready").json()["tiers"]
    assert [workers[tier]["in_flight"] for tier in ("small", "large")] == [0, 0]
