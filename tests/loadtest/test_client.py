"""One request: what counts as its first token, what is recorded of it, and what is a failure."""

from __future__ import annotations

import time

import pytest

from loadtest.client import Client
from loadtest.errors import BadTarget, CallFailed, TargetDown, Unreachable
from loadtest.schedule import Arrival
from loadtest.systems import Chat, LiftThenChat

FIRST = Arrival(0, 0.0)


def chat(url: str, model: str, timeout_s: float = 20.0) -> Chat:
    return Chat("fake", Client(url, timeout_s), model)


@pytest.mark.parametrize("model", ["plain", "crlf", "cr"])
def test_a_whole_answer(standing, model):
    before = time.perf_counter()
    answer = chat(standing.url, model).send(FIRST, "hello")
    assert before < answer.first_token <= answer.end < time.perf_counter()
    assert (answer.prompt_tokens, answer.completion_tokens) == (11, 1)
    assert (answer.tier, answer.escalated, answer.lift, answer.phases_ms) == (None, None, None, {})


PAUSE_S = 0.2  # the fake server's, in the answers below


@pytest.mark.parametrize("model", ["reasoning", "tool"])
def test_reasoning_and_tool_calls_are_first_tokens(standing, model):
    """They come before a pause, the rest after it."""
    answer = chat(standing.url, model).send(FIRST, "hello")
    assert answer.end - answer.first_token >= PAUSE_S * 0.9


def test_a_role_is_no_token(standing):
    """It comes before the pause, the content after it."""
    before = time.perf_counter()
    answer = chat(standing.url, "role-first").send(FIRST, "hello")
    assert answer.first_token - before >= PAUSE_S * 0.9


def test_an_answer_without_text_has_its_first_token_at_its_end(standing):
    answer = chat(standing.url, "no-text").send(FIRST, "hello")
    assert answer.first_token <= answer.end


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("status-500", "HTTP 500: out of memory"),
        ("error-event", "boom"),
        ("bad-json", "malformed"),
        ("bad-usage", r"lift\.ms"),
        ("cut", "broke within the answer"),
        ("hang-up", "broke before an answer"),
        ("no-done", r"without \[DONE\]"),
        ("no-finish", "without a finish_reason"),
        ("nothing", "without a finish_reason"),
        ("abort", "aborted"),
        ("buffered", "application/json"),
    ],
)
def test_an_answer_that_is_not_whole_is_a_failure(standing, model, word):
    with pytest.raises(CallFailed, match=word) as caught:
        chat(standing.url, model).send(FIRST, "hello")
    assert not isinstance(caught.value, Unreachable)


def test_a_server_that_stalls_is_a_timeout(standing):
    with pytest.raises(CallFailed, match=r"timeout: no whole answer within 0\.2 s"):
        chat(standing.url, "stall", timeout_s=0.2).send(FIRST, "hello")


def test_the_extension_tells_more_than_the_headers(standing):
    answer = chat(standing.url, "router").send(FIRST, "hello")
    assert (answer.tier, answer.escalated, answer.lift) == ("large", True, "applied")
    assert answer.phases_ms == {"map": 1.5, "total": 4.0}


def test_headers_alone_are_enough(standing):
    answer = chat(standing.url, "headers-only").send(FIRST, "hello")
    assert (answer.tier, answer.escalated, answer.lift) == ("small", False, "none")


def test_a_failure_leaves_no_broken_connection_behind(start):
    """Whole answers and whole errors keep the connection; a cut one is replaced."""
    server = start()
    client = Client(server.url, 20)
    for _ in range(5):
        client.chat(Chat("x", client, "plain").body(FIRST, "hello"))
        with pytest.raises(CallFailed):
            client.chat(Chat("x", client, "status-500").body(FIRST, "hello"))
    assert server.stats()["connections"] == 1 + 1  # and the one that asks for the statistics
    with pytest.raises(CallFailed):
        client.chat(Chat("x", client, "cut").body(FIRST, "hello"))
    client.chat(Chat("x", client, "plain").body(FIRST, "hello"))
    assert server.stats()["connections"] == 2 + 2


def test_the_body_is_the_configuration(start):
    server = start(keep=True)
    system = Chat("x", Client(server.url), "kvlift", max_tokens=3, extra={"ignore_eos": True, "temperature": 0.5})
    system.send(FIRST, "hello")
    system.send(Arrival(1, 0.0, 100, output_tokens=7), "again")
    bodies = [body for _, body in server.stats()["asked"]]
    assert bodies[0] == {
        "model": "kvlift",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    assert bodies[1]["max_tokens"] == 7


def test_a_lift_comes_first_and_names_its_namespace(start):
    server = start(keep=True)
    system = LiftThenChat(
        chat(server.url, "large"), "http://source:1", pack="p", rho=0.2, when="faster", lift_timeout_s=9, lease_s=3
    )
    answer = system.send(FIRST, "hello")
    (first, lift), (second, body) = server.stats()["asked"]
    assert (first, second) == ("lift", "chat")
    assert body.pop("extra_key") == "ns-1"
    assert lift == {
        "request": body,
        "source": {"url": "http://source:1"},
        "pack": "p",
        "rho": 0.2,
        "when": "faster",
        "lease_s": 3,
        "timeout_s": 9,
    }
    assert answer.lift == "applied"
    assert {"map": 2.0, "total": 5.0}.items() <= answer.phases_ms.items()
    assert answer.phases_ms["lift_call"] > 0 and answer.phases_ms["chat_call"] > 0


@pytest.mark.parametrize(("pack", "word"), [("broken", "no such pack"), ("evicted", "holds nothing")])
def test_a_lift_that_fails_is_a_native_prefill_and_says_so(start, pack, word):
    server = start(keep=True)
    answer = LiftThenChat(chat(server.url, "large"), "http://source:1", pack=pack).send(FIRST, "hello")
    assert answer.lift == "fallback_prefill" and word in (answer.lift_reason or "")
    assert "extra_key" not in server.stats()["asked"][1][1]


def test_the_lift_body_is_one_that_workers_take():
    """The worker refuses unknown keys."""
    bodies = pytest.importorskip("sglang_ext.worker.bodies")
    sent: list[dict] = []

    class Recorder(Client):
        def post(self, path, body):
            assert path == "/kv/lift"
            sent.append(body)
            raise CallFailed("recorded")

        def chat(self, body):
            raise CallFailed("recorded")

    with pytest.raises(CallFailed):
        LiftThenChat(Chat("x", Recorder("http://h:1"), "m"), "http://source:1", rho=0.3).send(FIRST, "hello")
    assert bodies.LiftBody.model_validate(sent[0]).rho == 0.3


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://host", "http://host:port", "http://", "", "http://h/?x=1"])
def test_an_address_that_is_none(url):
    with pytest.raises(BadTarget, match="expected one like http://"):
        Client(url)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "http://no-such-host.invalid"])
def test_a_wrong_host_is_named(url):
    with pytest.raises(TargetDown, match=f"no connection to {url}"):
        Client(url).check()
    with pytest.raises(Unreachable, match=f"no connection to {url}"):
        chat(url, "plain").send(FIRST, "hello")


def test_a_running_server_passes_the_check(standing):
    Client(standing.url).check()
