"""Keys, tenants and admission, as clients meet them. Numbers are those of the case list."""

from __future__ import annotations

import hashlib
import logging
import threading
from contextlib import contextmanager

import httpx
import openai
import pytest

from tests.router.conftest import MESSAGES, contents
from tests.router.fake_worker import UNSURE, applied, until
from tests.router.test_disconnect import hang_up

ACME, BETA = {"authorization": "Bearer acme-secret"}, {"x-api-key": "beta-secret"}
PAGE = {"/", "/page/page.js", "/page/page.css"}
DOCS = {"/docs", "/redoc", "/openapi.json", "/docs/oauth2-redirect"}
OPEN = {"/health", "/ready", *PAGE, *DOCS}
"""What tells nothing of tenants: that the router runs, whether it is ready, its page and its documentation."""


@pytest.fixture
def keyed(build, monkeypatch):
    """Makes a house whose clients need keys."""

    def make(acme=None, **parts):
        monkeypatch.setenv("ACME_KEY", "acme-secret")
        digest = hashlib.sha256(b"beta-secret").hexdigest()
        keys = [{"tenant": "acme", "key_env": "ACME_KEY", **(acme or {})}, {"tenant": "beta", "key_sha256": digest}]
        return build(auth={"keys": keys}, **parts)

    return make


def post(house, headers, **fields):
    body = {"model": "kvlift", "messages": MESSAGES, **fields}
    return house.http.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer wrong-key"}, {"x-api-key": "wrong-key"}])
def test_without_a_right_key_a_request_is_a_401_and_no_worker_is_asked(keyed, stream, headers):
    house = keyed()
    response = post(house, headers, stream=stream)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert "wrong" not in response.text and house.small.calls == []


def test_every_route_but_the_open_ones_needs_a_key(keyed):
    house = keyed()
    described = house.http.get("/openapi.json").json()["paths"]
    asked = {(method.upper(), path) for path, methods in described.items() for method in methods}
    asked |= {("GET", path) for path in OPEN}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/metrics", "/status"} <= described.keys()
    for method, path in asked:
        response = house.http.request(method, path.replace("{name}", "kvlift"))
        assert (response.status_code != 401) == (path in OPEN), path


def test_the_body_of_a_request_without_a_key_is_not_read(keyed):
    house = keyed(limits={"max_body_bytes": 10})
    assert post(house, {}).status_code == 401
    assert post(house, ACME).status_code == 413


def test_the_openai_client_with_a_right_and_a_wrong_key(keyed):
    house = keyed()
    for key, right in (("acme-secret", True), ("beta-secret", True), ("acme-secre", False)):
        client = openai.OpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0)
        if right:
            assert client.chat.completions.create(model="kvlift", messages=MESSAGES).choices[0].message.content
        else:
            with pytest.raises(openai.AuthenticationError):
                client.chat.completions.create(model="kvlift", messages=MESSAGES)


def test_readiness_is_told_to_anyone_and_the_rest_to_those_with_a_key(keyed):
    house = keyed()
    assert house.http.get("/ready").json() == {"ready": True, "draining": False}
    assert house.http.get("/ready", headers=ACME).json()["tiers"]["small"]["up"] is True


def salts(house, headers, **fields):
    """The salt of every call that a request makes: small chat, lift, its source, large chat."""
    for worker in (house.small, house.large):
        worker.calls.clear()
        worker.lifts.clear()
    assert post(house, headers, **fields).status_code == 200
    (small,), (lift,), (large,) = house.small.calls, house.large.lifts, house.large.calls
    assert "extra_key" not in large
    seen = {small["cache_salt"], lift["cache_salt"], lift["source"]["cache_salt"], lift["request"]["cache_salt"]}
    return seen | {large["cache_salt"]}


def test_case_44_the_tenant_is_the_salt_of_chat_and_lift(keyed, stream):
    house = keyed()
    house.small.script.logprob = UNSURE
    house.large.script.lift = applied(status="fallback_prefill", namespace=None, reason="busy")
    sets = [salts(house, who, stream=stream, **own) for who in (ACME, BETA) for own in ({}, {"cache_salt": "mine"})]
    assert all(len(seen) == 1 for seen in sets) and len(set.union(*sets)) == 4
    assert salts(house, ACME, stream=stream) == sets[0]
    assert not any("acme" in salt or "mine" in salt for seen in sets for salt in seen)


def test_a_salt_of_a_client_cannot_be_another_tenants(keyed):
    house = keyed()
    post(house, ACME)
    stolen = house.small.calls[-1]["cache_salt"]
    post(house, BETA, cache_salt=stolen)
    assert house.small.calls[-1]["cache_salt"] != stolen


def test_a_tenants_salt_that_is_no_string_is_a_400(keyed):
    assert post(keyed(), ACME, cache_salt=["a"]).json()["error"]["param"] == "cache_salt"


def test_case_63_no_key_of_a_client_reaches_a_worker_or_a_log(keyed, stream, caplog):
    caplog.set_level(logging.DEBUG)
    house = keyed()
    for headers in (ACME, BETA, {"authorization": "Bearer wrong-secret"}):
        post(house, headers, stream=stream)
    seen = [str(headers) for _, headers in house.small.headers + house.large.headers]
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert seen and ours
    assert not any("-secret" in text for text in seen + ours + [house.http.get("/ready", headers=ACME).text])


@contextmanager
def taken(house, headers):
    """One place is taken, by a request whose answer stalls until this ends."""
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    with httpx.Client(base_url=house.url, headers=headers, timeout=60) as client:
        body = {"model": "small", "messages": MESSAGES, "stream": True}
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            until(lambda: house.small.stalled == 1)
            house.small.script.fault_after = None  # for whoever comes later
            yield
    until(lambda: house.small.aborted == 1)


def test_a_tenants_limit_is_its_own(keyed, stream):
    house = keyed(acme={"max_in_flight": 1})
    with taken(house, ACME):
        refused = post(house, ACME, stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_busy")
        assert refused.headers["retry-after"] == "1"
        assert post(house, BETA, stream=stream).status_code == 200
    until(lambda: house.gateway.idle)
    assert post(house, ACME, stream=stream).status_code == 200


def test_over_the_limits_a_request_waits_then_is_refused_with_429(build, stream):
    house = build(limits={"max_in_flight": 1, "max_queue": 1, "queue_s": 600})
    answers = []
    with taken(house, {}):
        thread = threading.Thread(target=lambda: answers.append(post(house, {}, stream=stream)))
        thread.start()
        until(lambda: house.gateway.admission.waiting.count == 1)
        told = house.http.get("/ready").json()
        assert (told["in_flight"], told["waiting"]) == (1, 1)
        refused = post(house, {}, stream=stream)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert not answers
    thread.join(20)
    assert answers[0].status_code == 200
    until(lambda: house.gateway.idle)


def test_queue_s_ends_the_wait(build, stream):
    house = build(limits={"max_in_flight": 1, "queue_s": 0.2})
    with taken(house, {}):
        refused = post(house, {}, stream=stream)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_timeout")
        assert refused.headers["retry-after"] == "1"
    until(lambda: house.gateway.idle)


def test_case_42_a_client_that_hangs_up_in_the_queue_leaves_it(build, stream):
    house = build(limits={"max_in_flight": 1})
    with taken(house, {}):
        hang_up(house, lambda: house.gateway.admission.waiting.count == 1, stream=stream)
        until(lambda: house.gateway.admission.waiting.count == 0)
        assert len(house.small.calls) == 1
    until(lambda: house.gateway.idle)
    assert contents(house.stream()[1]) == "small says"


def test_health_and_models_are_told_while_everything_is_taken(build):
    house = build(limits={"max_in_flight": 1, "max_queue": 0})
    with taken(house, {}):
        told = [house.http.get(path).status_code for path in ("/health", "/ready", "/v1/models")]
        assert told == [200] * 3
        assert post(house, {}).json()["error"]["code"] == "queue_full"


def test_a_draining_router_says_so_before_it_says_busy(build):
    house = build(limits={"max_in_flight": 1, "max_queue": 0})
    with taken(house, {}):
        house.gateway.drain()
        response = post(house, {})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")
