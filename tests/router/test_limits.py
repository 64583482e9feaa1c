"""Errors, limits and retries. Numbers are those of the case list."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import free_port

TOO_LONG = {
    "error": {
        "message": "The input (9000 tokens) is longer than the model's context length (4096 tokens).",
        "code": 400,
    }
}
BAD = {
    "error": {"message": "temperature must be positive", "type": "BadRequestError", "param": "temperature", "code": 400}
}


@pytest.mark.parametrize("limit", ["first_token_s", "idle_s"])
def test_case_22_first_token_and_idle_limits_are_separate(build, limit):
    house = build(limits={limit: 0.2})
    house.small.script.fault = "stall"
    house.small.script.fault_after = 0 if limit == "first_token_s" else 1
    response, lines = house.stream(model="sure")
    assert contents(lines) == "large says so"
    assert response.headers["x-kvlift-reason"] == limit.replace("_s", "_timeout")


def test_case_22_a_slow_first_token_does_not_meet_the_idle_limit(build):
    house = build(limits={"idle_s": 0.2})
    house.small.script.first_token_s = 0.6
    assert house.stream()[0].headers["x-kvlift-tier"] == "small"


def test_case_22_an_idle_answer_that_was_shown_ends_in_an_error_event(build):
    house = build(limits={"idle_s": 0.2})
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    _, lines = house.stream(model="never")
    assert json.loads(lines[-1])["error"]["code"] == "idle_timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_attempt_s_ends_an_attempt_that_may_still_be_discarded(build, stream):
    house = build(limits={"attempt_s": 0.3})
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    response = house.stream()[0] if stream else house.ask()
    assert response.headers["x-kvlift-reason"] == "attempt_timeout"
    assert response.headers["x-kvlift-tier"] == "large"


@pytest.mark.parametrize("stream", [True, False])
def test_attempt_s_does_not_bound_the_last_tier(build, stream):
    house = build(limits={"attempt_s": 0.2})
    house.large.script.first_token_s = 0.5
    assert house.ask(model="large", stream=stream).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
def test_total_s_bounds_every_answer(build, stream):
    house = build(limits={"total_s": 0.3})
    house.large.script.fault_after, house.large.script.fault = 0, "stall"
    response = house.ask(model="large", stream=stream)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "total_timeout"


def test_case_32_a_failure_after_the_time_budget_is_not_retried(build):
    house = build(limits={"total_s": 0.3, "retries": 5, "max_calls": 9})
    house.large.script.status = 503
    assert house.ask(model="large").status_code in (503, 504)
    assert len(house.large.calls) < 6


@pytest.mark.parametrize("stream", [True, False])
def test_case_23_a_prompt_too_long_for_the_small_model_goes_to_the_large_one(house, stream):
    house.small.script.status, house.small.script.error = 400, TOO_LONG
    response = house.ask(stream=stream)
    assert (response.status_code, response.headers["x-kvlift-reason"]) == (200, "context_length")
    assert response.headers["x-kvlift-lift"] == "none"


def test_case_23_also_where_the_worker_says_so_in_the_stream(house):
    house.small.script.fault_after, house.small.script.fault = 0, "error_event"
    house.small.script.error_event = TOO_LONG["error"]
    response, lines = house.stream()
    assert response.headers["x-kvlift-reason"] == "context_length"
    assert contents(lines) == "large says so"


@pytest.mark.parametrize("small", [{"context_length": 100}, {}])
def test_case_25_an_answer_that_cannot_fit_the_small_context_makes_no_small_attempt(build, small):
    house = build(small=small)
    response = house.ask(max_tokens=4096)  # the context that the small worker reports
    assert response.headers["x-kvlift-reason"] == "context_length"
    assert house.small.calls == []
    assert response.json()["kvlift"]["skipped"] == [{"tier": "small", "reason": "context_length"}]


@pytest.mark.parametrize("stream", [True, False])
def test_case_25_too_long_for_the_large_model_is_one_400_that_names_the_limit(house, stream):
    for worker in (house.small, house.large):
        worker.script.status, worker.script.error = 400, TOO_LONG
    response = house.ask(stream=stream)
    assert response.status_code == 400
    assert "4096 tokens" in response.json()["error"]["message"]


def test_case_26_bad_requests_leave_a_worker_up(house):
    house.small.script.status, house.small.script.error = 400, BAD
    assert {house.ask().status_code for _ in range(50)} == {400}
    house.small.script.status = 200
    assert house.ask().headers["x-kvlift-tier"] == "small"


@pytest.mark.parametrize("stream", [True, False])
def test_case_31_a_deterministic_400_is_one_attempt_and_is_returned_as_it_is(build, stream):
    house = build(limits={"retries": 3})
    house.small.script.status, house.small.script.error = 400, BAD
    response = house.ask(stream=stream)
    assert (response.status_code, response.json()["error"]) == (400, BAD["error"])
    assert (len(house.small.calls), len(house.large.calls)) == (1, 0)


@pytest.mark.parametrize(("status", "seen"), [(429, 429), (503, 503), (502, 502)])
def test_case_28_two_retries_are_exactly_three_calls(build, status, seen):
    house = build(limits={"retries": 2})
    house.large.script.status = status
    assert house.ask(model="large").status_code == seen
    assert len(house.large.calls) == 3


def test_a_retry_that_succeeds_is_the_answer(build):
    house = build(limits={"retries": 1})
    house.small.script.status, house.small.script.fail_times = 503, 1
    assert house.ask().headers["x-kvlift-tier"] == "small"


@pytest.mark.parametrize("status", [401, 404, 408, 429, 500, 503])
def test_a_small_worker_in_trouble_escalates_without_a_retry_by_default(house, status):
    house.small.script.status = status
    response = house.ask()
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-reason"]) == ("large", f"upstream_{status}")
    assert response.headers["x-kvlift-lift"] == "none"
    assert len(house.small.calls) == 1


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_large_worker_in_trouble_is_a_bad_gateway(house, status):
    house.large.script.status = status
    response = house.ask(model="large")
    assert response.status_code == 502 and "'large'" in response.json()["error"]["message"]


def test_case_33_a_call_budget_counts_retries(build):
    house = build(limits={"retries": 5, "max_calls": 2})
    house.small.script.status = 503
    response = house.ask()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "max_calls")
    assert (len(house.small.calls), len(house.large.calls)) == (2, 0)


def test_case_33_a_budget_of_two_is_one_attempt_each(build):
    house = build(limits={"max_calls": 2})
    house.small.script.logprob = -9.0
    assert house.ask().headers["x-kvlift-tier"] == "large"


@pytest.mark.parametrize("stream", [True, False])
def test_connect_s_bounds_the_connection_and_a_refused_one_escalates(build, stream):
    house = build(small={"address": f"http://127.0.0.1:{free_port()}"}, wait=False)
    house.gateway.monitor["small"].up = True  # not known to be down yet
    response = house.ask(stream=stream)
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-reason"]) == ("large", "connect_failed")


def test_a_body_over_the_limit_is_413_before_it_is_read(build):
    """Case 35."""
    house = build(limits={"max_body_bytes": 1000})
    with socket.create_connection(("127.0.0.1", httpx.URL(house.url).port), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n"
        )  # and no body
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_chunked_body_over_the_limit_is_413(build):
    house = build(limits={"max_body_bytes": 1000})
    assert house.http.post("/v1/chat/completions", content=iter([b"x" * 600] * 2)).status_code == 413


@pytest.mark.parametrize(
    "raw",
    [
        b"{",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"messages": []}',
        b'{"model": 3}',
        b'{"model": "kvlift", "stream": "yes"}',
    ],
)
def test_a_malformed_body_is_a_400(house, raw):
    response = house.http.post("/v1/chat/completions", content=raw)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_extra_key_is_the_routers(house):
    assert house.ask(extra_key="someone's namespace").status_code == 400


def test_a_failed_answer_tells_its_attempts(house):
    house.small.script.status = house.large.script.status = 500
    told = house.ask().json()["kvlift"]
    assert [(a["tier"], a["outcome"], a["reason"]) for a in told["attempts"]] == [
        ("small", "failed", "upstream_500"),
        ("large", "failed", "upstream_500"),
    ]
    assert extension([json.dumps({"kvlift": told})]) == told and MESSAGES[0]["content"] not in json.dumps(told)
