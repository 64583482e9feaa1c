"""A client that hangs up, and a router that is told to stop."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading

import httpx
import pytest

from tests.router.conftest import MESSAGES, contents
from tests.router.fake_worker import UNSURE, FakeWorker, applied, free_port, serving, until


def hang_up(house, ready, **fields):
    """Sends a request and closes its connection once `ready` holds."""
    body = json.dumps({"model": "kvlift", "messages": MESSAGES, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", httpx.URL(house.url).port)) as connection:
        connection.sendall(head.encode() + body)
        until(ready)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("model", ["kvlift", "never", "small"])
def test_case_37_hanging_up_in_the_small_attempt_aborts_it(house, stream, model):
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    hang_up(house, lambda: house.small.running == 1, model=model, stream=stream)
    until(lambda: house.small.aborted == 1 and house.small.running == 0)
    until(lambda: house.gateway.idle)  # case 42
    assert house.large.calls == []


@pytest.mark.parametrize("stream", [True, False])
def test_case_37_hanging_up_in_the_large_answer_aborts_it(house, stream):
    house.small.script.logprob = UNSURE
    house.large.script.fault_after, house.large.script.fault = 1, "stall"
    hang_up(house, lambda: house.large.running == 1, stream=stream)
    until(lambda: house.large.aborted == 1 and house.large.running == 0)
    until(lambda: house.gateway.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_case_37_hanging_up_in_the_lift_never_reaches_the_large_chat(house, stream):
    house.small.script.logprob = UNSURE
    house.large.script.lift, house.large.script.lift_delay_s = applied(), 1.0
    hang_up(house, lambda: len(house.large.lifts) == 1, stream=stream)
    until(lambda: house.gateway.idle)
    assert house.large.calls == []


def test_case_42_many_early_closes_leave_nothing_in_flight(house):
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    for number in range(1, 11):
        hang_up(house, lambda n=number: len(house.small.calls) == n, stream=True)
    until(lambda: house.gateway.idle and house.small.running == 0)
    assert house.http.get("/ready").json()["in_flight"] == 0


def test_connections_to_a_worker_are_kept(house):
    for _ in range(5):
        house.stream()
        house.ask()
    chats = [headers for path, headers in house.small.headers if path.endswith("completions")]
    assert len(chats) == 10
    assert len(house.small.connections) <= 3  # one for chats, and the probes'


@pytest.fixture(params=[20.0])
def process(tmp_path, request):
    """A router in its own process, before one worker."""
    worker = FakeWorker("served-small")
    port = free_port()
    with serving(worker.app()) as address:
        config = tmp_path / "router.yaml"
        config.write_text(
            f"listen: {{port: {port}}}\ntiers: [{{name: small, served: served-small, address: '{address}'}}]\n"
            f"policies: {{p: {{method: never}}}}\ndefault_policy: p\ndrain_s: {request.param}\n"
            "limits: {max_in_flight: 1}\n"
        )
        child = subprocess.Popen(
            [sys.executable, "-m", "router.cli", "router", "-c", str(config)], env=dict(os.environ)
        )
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20)
        try:
            until(lambda: ready(client) == 200, 30)
            yield worker, child, client
        finally:
            child.kill()
            child.wait()
            client.close()


def ready(client):
    try:
        return client.get("/ready").status_code
    except httpx.TransportError:
        return None


def test_case_43_sigterm_turns_ready_off_finishes_the_stream_and_exits_zero(process):
    worker, child, client = process
    worker.script.first_token_s = 1.5
    answer = []
    body = {"model": "small", "messages": MESSAGES, "stream": True}
    thread = threading.Thread(target=lambda: answer.append(client.post("/v1/chat/completions", json=body).text))
    thread.start()
    until(lambda: worker.running == 1)
    child.send_signal(signal.SIGTERM)
    until(lambda: ready(client) == 503)
    refused = client.post("/v1/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    thread.join(20)
    lines = [line.removeprefix("data: ") for line in answer[0].split("\n") if line.startswith("data: ")]
    assert contents(lines) == "Hello there." and lines[-1] == "[DONE]"
    assert child.wait(20) == 0


def test_case_43_what_waits_for_its_place_is_answered_before_the_end(process):
    worker, child, client = process
    worker.script.held = threading.Event()
    body = {"model": "small", "messages": MESSAGES}
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(client.post("/v1/chat/completions", json=body)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    until(lambda: client.get("/ready").json()["waiting"] == 2)
    child.send_signal(signal.SIGTERM)
    until(lambda: ready(client) == 503)
    worker.script.held.set()
    for thread in threads:
        thread.join(20)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert child.wait(20) == 0


@pytest.mark.parametrize("process", [0.3], indirect=True)
def test_drain_s_ends_the_wait_for_an_answer_that_does_not_end(process):
    worker, child, client = process
    worker.script.fault_after, worker.script.fault = 1, "stall"
    with client.stream("POST", "/v1/chat/completions", json={"model": "small", "messages": MESSAGES, "stream": True}):
        until(lambda: worker.running == 1)
        child.send_signal(signal.SIGTERM)
        assert child.wait(20) == 0
    until(lambda: worker.running == 0)
