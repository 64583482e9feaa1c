"""The circuit breaker of one worker: its laws on a clock of the test, then what clients see of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import Breaker
from router.config import Breaker as Settings
from tests.router.conftest import contents
from tests.router.fake_worker import free_port, until
from tests.router.test_disconnect import hang_up


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def make(failures=3, interval_s=10.0):
    clock = Clock()
    return Breaker("w", Settings(failures=failures, interval_s=interval_s), clock), clock


def fail(breaker, times):
    for _ in range(times):
        breaker.failed()


@pytest.mark.parametrize("failures", [1, 2, 5])
def test_it_opens_after_so_many_failures_in_a_row_and_not_before(failures):
    breaker, _ = make(failures)
    fail(breaker, failures - 1)
    assert breaker.may_call()
    fail(breaker, 1)
    assert not breaker.may_call() and breaker.state == "open"


def test_a_success_between_begins_the_count_anew():
    breaker, _ = make(3)
    for _ in range(5):
        fail(breaker, 2)
        breaker.succeeded()
    assert breaker.may_call()


def test_an_answer_that_only_begins_does_not():
    breaker, _ = make(3)
    for _ in range(3):
        breaker.began()
        breaker.failed()
    assert not breaker.may_call()


def test_one_trial_per_interval_whatever_becomes_of_it():
    breaker, clock = make(1, 10.0)
    fail(breaker, 1)
    assert breaker.seconds_shut() == 10.0
    trials = 0
    for clock.now in range(101):
        if breaker.may_call():
            breaker.take()
            trials += 1
            assert not breaker.may_call()
    assert trials == 10


def test_a_trial_that_is_answered_closes_it_on_probation():
    breaker, clock = make(3, 10.0)
    fail(breaker, 3)
    clock.now = 10.0
    breaker.take()
    breaker.began()
    assert breaker.may_call() and breaker.state == "closed"
    fail(breaker, 1)
    assert breaker.state == "open"
    clock.now = 20.0
    breaker.began()
    breaker.succeeded()
    fail(breaker, 2)
    assert breaker.state == "closed"


def test_failures_of_calls_made_before_it_opened_do_not_put_the_trial_off():
    breaker, clock = make(1, 10.0)
    fail(breaker, 1)
    clock.now = 9.0
    fail(breaker, 5)
    assert breaker.seconds_shut() == 1.0


STEPS = st.lists(st.sampled_from(["failed", "succeeded", "began", "take", "reset", "wait"]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS, failures=st.integers(1, 4))
def test_it_is_shut_only_within_an_interval_of_enough_failures(steps, failures):
    breaker, clock = make(failures, 10.0)
    for step in steps:
        if step == "wait":
            clock.now += 3.0
        else:
            getattr(breaker, step)()
        assert 0 <= breaker.seconds_shut() <= 10.0
        assert breaker.may_call() == (breaker.seconds_shut() == 0)
        if breaker.state == "closed":
            assert breaker.may_call()
        if step in ("began", "reset"):
            assert breaker.state == "closed"
    if "failed" not in steps or steps.count("failed") < failures:
        assert breaker.state == "closed" or "began" in steps
    clock.now += 10.0
    assert breaker.may_call()


@pytest.fixture
def broken(build):
    """A house whose small worker fails, and the clock of its breaker."""
    house = build(breaker={"failures": 3, "interval_s": 10}, health={"interval_s": 60})
    house.small.script.status = 500
    clock = Clock()
    house.gateway.monitor["small"].worker.breaker._clock = clock
    return house, clock


def reasons(house, count, **fields):
    return [house.ask(**fields).headers["x-kvlift-reason"] for _ in range(count)]


def test_case_27_after_k_failures_requests_go_straight_to_the_large_model(broken):
    house, _ = broken
    assert reasons(house, 6) == ["upstream_500"] * 3 + ["breaker_open"] * 3
    assert (len(house.small.calls), len(house.large.calls)) == (3, 6)
    assert house.ask().json()["kvlift"]["skipped"] == [{"tier": "small", "reason": "breaker_open"}]


def test_case_27_one_call_per_interval_tries_the_worker_and_brings_it_back(broken):
    house, clock = broken
    reasons(house, 3)
    for clock.now in (10.0, 20.0, 30.0):
        assert reasons(house, 3) == ["upstream_500", "breaker_open", "breaker_open"]
    house.small.script.status = 200
    assert reasons(house, 1) == ["breaker_open"]
    clock.now = 40.0
    assert reasons(house, 3) == ["confident"] * 3
    assert len(house.small.calls) == 3 + 3 + 3


def test_case_27_a_worker_that_comes_up_again_is_asked_at_once(build):
    house = build(breaker={"failures": 1, "interval_s": 600})
    house.small.script.status = house.small.script.health_status = 500
    assert reasons(house, 2) == ["upstream_500", "breaker_open"]
    until(lambda: not house.gateway.monitor["small"].up)
    house.small.script.status = house.small.script.health_status = 200
    until(lambda: house.gateway.monitor["small"].up)
    assert reasons(house, 1) == ["confident"]


@pytest.mark.parametrize("fault", ["refused", "cut", "stall", "bad_json", "done", "abort", "error_event", "slow"])
def test_what_opens_it(build, fault):
    limits = {"first_token_s": 0.3} if fault in ("slow", "stall") else {}
    house = build(breaker={"failures": 2, "interval_s": 600}, limits=limits, health={"interval_s": 60})
    if fault == "refused":
        house.gateway.monitor["small"].worker._client.base_url = f"http://127.0.0.1:{free_port()}"
    elif fault == "slow":
        house.small.script.first_token_s = 30
    else:
        house.small.script.fault_after, house.small.script.fault = 0, fault
    for _ in range(2):
        assert contents(house.stream()[1]) == "large says so"
    assert house.stream()[0].headers["x-kvlift-reason"] == "breaker_open"


@pytest.mark.parametrize("status", [400, 401, 404, 408, 413, 422, 429])
def test_case_26_no_4xx_opens_it(build, stream, status):
    house = build(breaker={"failures": 2, "interval_s": 600})
    house.small.script.status = status
    for _ in range(5):
        house.ask(model="small", stream=stream)
    assert len(house.small.calls) == 5
    house.small.script.status = 200
    assert house.ask(stream=stream).headers["x-kvlift-tier"] == "small"


def test_a_request_that_has_used_up_its_own_time_blames_nobody(build, stream):
    house = build(breaker={"failures": 1, "interval_s": 600}, limits={"total_s": 0.2})
    house.large.script.first_token_s = 30
    for _ in range(2):
        assert house.ask(model="large", stream=stream).json()["error"]["code"] == "total_timeout"


def test_clients_that_hang_up_open_nothing(build, stream):
    house = build(breaker={"failures": 1, "interval_s": 600})
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    hang_up(house, lambda: house.small.running == 1, stream=stream)
    until(lambda: house.gateway.idle)
    house.small.script.fault_after = None
    assert house.ask().headers["x-kvlift-tier"] == "small"


def test_where_no_other_tier_is_left_the_answer_is_a_503_with_a_time_to_come_back(build, stream):
    house = build(breaker={"failures": 2, "interval_s": 600})
    house.large.script.status = 500
    seen = [house.ask(model="large", stream=stream) for _ in range(3)]
    assert [response.status_code for response in seen] == [502, 502, 503]
    assert seen[-1].json()["error"]["code"] == "breaker_open"
    assert 590 <= int(seen[-1].headers["retry-after"]) <= 600
    assert len(house.large.calls) == 2


def test_a_policy_sees_a_broken_tier_as_one_that_is_not_ready(build):
    both = {"method": "all", "of": [{"method": "avg_logprob", "threshold": -1.0}, {"method": "tier_ready"}]}
    house = build(breaker={"failures": 1}, policies={"both": both}, default_policy="both")
    house.small.script.logprob, house.large.script.status = -9.0, 500
    assert house.ask().status_code == 502
    assert house.ask().headers["x-kvlift-tier"] == "small"


def test_case_29_and_2_a_cut_after_content_counts_and_is_not_retried(build):
    house = build(breaker={"failures": 2, "interval_s": 600}, limits={"retries": 3})
    house.small.script.fault_after, house.small.script.fault = 1, "cut"
    for _ in range(2):
        assert "error" in house.stream(model="small")[1][-1]
    assert len(house.small.calls) == 2
    assert house.ask(model="small").status_code == 503
