"""The hand-over: when it is asked for, what is sent, and that no failure of it costs the answer."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from pydantic import TypeAdapter

from router.config import Selector
from router.lifting import why_unsupported
from router.worker import Capabilities
from tests.router.conftest import MESSAGES, House, contents, extension
from tests.router.fake_worker import UNSURE, applied, capabilities, until


@pytest.fixture
def unsure(house):
    house.small.script.logprob = UNSURE
    house.large.script.lift = applied()
    return house


@pytest.mark.parametrize("stream", [True, False])
def test_an_applied_lift_names_its_namespace_in_the_chat_request(unsure, stream):
    response = unsure.ask(stream=stream, cache_salt="tenant")
    assert response.headers["x-kvlift-lift"] == "applied"
    (call,) = unsure.large.calls
    assert call["extra_key"] == "ns-1"
    assert "cache_salt" not in call  # the namespace has it folded in
    (lift,) = unsure.large.lifts
    request = {"model": "served-large", "messages": MESSAGES, "stream": stream, "cache_salt": "tenant"}
    if stream:
        request["stream_options"] = {"include_usage": True}
    assert lift == {
        "request": request,
        "source": {"url": unsure.small.address, "api_key": None, "cache_salt": "tenant"},
        "pack": "small-to-large",
        "rho": 0.3,
        "selector": "rank_disagreement",
        "when": "faster",
        "cache_salt": "tenant",
        "lease_s": 10.0,
        "timeout_s": 5.0,
    }


def test_the_extension_tells_the_lift_without_its_namespace(unsure):
    _, lines = unsure.stream()
    told = applied()
    del told["namespace"]
    assert extension(lines)["lift"] == told


FAILURES = {
    "status 500": {"lift_status": 500, "lift": {"error": "boom"}},
    "status 400": {"lift_status": 400, "lift": {"error": {"message": "rho"}}},
    "fallback": {"lift": applied(status="fallback_prefill", namespace=None, reason="source evicted")},
    "unsupported": {"lift": applied(status="unsupported", namespace=None, reason="other rope")},
    "not applied, yet a namespace": {"lift": applied(status="fallback_prefill", namespace="ns-2")},
    "no namespace": {"lift": applied(namespace=None)},
    "not an object": {"lift": [1]},
    "unknown status": {"lift": applied(status="maybe")},
    "slow": {"lift_delay_s": 30.0},
}


@pytest.fixture(scope="module")
def impatient():
    """A house that waits little for a lift."""
    pairs = [{"source": "small", "target": "large", "pack": "small-to-large"}]
    with ExitStack() as stack:
        yield House(stack, lift={"timeout_s": 0.2, "pairs": pairs})


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("stream", [True, False])
def test_every_failure_of_a_lift_ends_in_a_native_prefill(impatient, monkeypatch, failure, stream):
    monkeypatch.setattr("router.lifting._NETWORK_S", 0.1)
    house = impatient
    house.reset()
    house.small.script.logprob = UNSURE
    for key, value in FAILURES[failure].items():
        setattr(house.large.script, key, value)
    response = house.ask(stream=stream, cache_salt="tenant")
    assert response.status_code == 200 and "large" in response.text
    expected = "unsupported" if failure == "unsupported" else "fallback_prefill"
    assert response.headers["x-kvlift-lift"] == expected
    (call,) = house.large.calls
    assert "extra_key" not in call and call["cache_salt"] == "tenant"


def test_lift_never_is_a_native_prefill(unsure):
    response = unsure.ask(kvlift={"lift": "never"})
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-lift"]) == ("large", "none")
    assert unsure.large.lifts == []


def test_lift_require_is_an_error_unless_applied(unsure):
    assert unsure.ask(kvlift={"lift": "require"}).status_code == 200
    unsure.large.script.lift = applied(status="fallback_prefill", namespace=None, reason="evicted")
    response = unsure.ask(kvlift={"lift": "require"})
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "lift_not_applied" and "evicted" in response.json()["error"]["message"]
    assert len(unsure.large.calls) == 1


def test_lift_require_without_a_source_is_an_error(unsure):
    unsure.small.script.status = 500
    assert unsure.ask(kvlift={"lift": "require"}).status_code == 503


BUDGET = ("rho", "coverage")


def budget_of(lift):
    return {key: lift[key] for key in BUDGET if key in lift}


@pytest.mark.parametrize("budget", [{"rho": 0}, {"rho": 0.7}, {"rho": 1}, {"coverage": 0}, {"coverage": 0.5}])
def test_a_request_may_set_its_budget(unsure, budget):
    unsure.ask(kvlift=budget)
    assert budget_of(unsure.large.lifts[0]) == budget


@pytest.mark.parametrize("own", [{}, {"rho": 0.1}, {"coverage": 0.2}])
@pytest.mark.parametrize("configured", [{"rho": 0.5}, {"coverage": 0.6}])
def test_a_requests_budget_comes_before_the_configs_and_only_one_is_sent(build, configured, own):
    pairs = [{"source": "small", "target": "large", "pack": "d-pack"}]
    house = build(lift={"pairs": pairs, **configured})
    house.small.script.logprob = UNSURE
    house.ask(kvlift=own)
    assert budget_of(house.large.lifts[0]) == (own or configured)


def test_the_lift_keys_of_the_config_reach_the_worker(build):
    pairs = [{"source": "small", "target": "large", "pack": "d-pack"}]
    keys = {"rho": 0.5, "selector": "random", "when": "always", "lease_s": 3, "timeout_s": 2}
    house = build(lift={"pairs": pairs, **keys})
    house.small.script.logprob = UNSURE
    house.ask()
    house.ask(kvlift={"selector": "random:7"})
    sent = [{key: lift[key] for key in ("pack", *keys)} for lift in house.large.lifts]
    assert sent == [{"pack": "d-pack", **keys}, {"pack": "d-pack", **keys, "selector": "random:7"}]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"selector": "magic"}, "rank_disagreement|source_attention|random"),
        ({"selector": "random:x"}, "selector"),
        ({"coverage": 1.1}, "coverage"),
        ({"rho": 0.3, "coverage": 0.5}, "either rho or coverage"),
    ],
)
def test_malformed_lift_options_are_a_400_that_names_them(unsure, options, named):
    response = unsure.ask(kvlift=options)
    assert response.status_code == 400 and named in response.json()["error"]["message"]


def test_the_router_knows_the_selectors_of_the_worker():
    from sglang_ext.transfer.selectors import NAMES

    taken = TypeAdapter(Selector)
    for name in (*NAMES, "random:12"):
        assert taken.validate_python(name) == name


@pytest.mark.parametrize("stream", [True, False])
def test_a_declined_lift_is_answered_natively_and_says_why(unsure, stream):
    choice = {"native_ms": 5.0, "lift_ms": 9.0, "chosen": "native"}
    reason = "a native prefill is expected to be faster"
    unsure.large.script.lift = {"status": "fallback_prefill", "reason": reason, "choice": choice, "rho": 0.3}
    response = unsure.ask(stream=stream)
    assert response.headers["x-kvlift-lift"] == "fallback_prefill"
    assert "extra_key" not in unsure.large.calls[0]
    _, lines = unsure.stream()
    assert (extension(lines)["lift"]["reason"], extension(lines)["lift"]["choice"]) == (reason, choice)


def test_a_required_lift_is_asked_for_in_any_case(unsure):
    unsure.ask(kvlift={"lift": "require"})
    unsure.ask(kvlift={"lift": "auto"})
    assert [lift["when"] for lift in unsure.large.lifts] == ["always", "faster"]


def test_a_failed_small_attempt_is_not_lifted(unsure):
    unsure.small.script.status = 500
    assert unsure.ask().headers["x-kvlift-lift"] == "none"
    assert unsure.large.lifts == []


def test_always_lifts_from_the_first_token_on(unsure):
    _, lines = unsure.stream(model="always")
    assert contents(lines) == "large says so"
    assert extension(lines)["lift"]["status"] == "applied"


@pytest.mark.parametrize(
    ("source", "target", "pack", "word"),
    [
        ({}, {}, None, "no pack"),
        (None, {}, "small-to-large", "source worker"),
        ({}, None, "small-to-large", "target worker"),
        ({"protocol": 2}, {}, "small-to-large", "protocol 2"),
        ({"tokenizer_digest": "other"}, {}, "small-to-large", "tokenizers"),
        ({"template_digest": "other"}, {}, "small-to-large", "templates"),
        ({"model_digest": "other"}, {}, "small-to-large", "another source model"),
        ({}, {}, "unknown", "not loaded"),
        ({}, {"packs": []}, "small-to-large", "not loaded"),
    ],
)
def test_case_59_a_pair_that_cannot_lift_is_known_without_a_call(source, target, pack, word):
    told = [
        None if c is None else Capabilities(**capabilities(n, **c)) for n, c in (("small", source), ("large", target))
    ]
    assert word in why_unsupported(*told, pack)


def test_a_pair_that_can_lift_has_no_reason_against_it():
    small, large = (Capabilities(**capabilities(name)) for name in ("small", "large"))
    assert why_unsupported(small, large, "small-to-large") is why_unsupported(small, large, "d-pack") is None


def test_case_51_a_pack_that_was_not_accepted_is_not_used():
    large = capabilities("large")
    large["packs"][0].update(accepted=False, reason="no acceptance record")
    reason = why_unsupported(Capabilities(**capabilities("small")), Capabilities(**large), "small-to-large")
    assert "no acceptance record" in reason


def test_an_unsupported_pair_is_told_and_the_worker_is_not_asked(build):
    house = build(lift={})
    house.small.script.logprob = UNSURE
    response = house.ask()
    assert response.headers["x-kvlift-lift"] == "unsupported"
    assert "lift.pairs" in response.json()["kvlift"]["lift"]["reason"]
    assert house.large.lifts == []


def test_plain_workers_without_the_plugin_make_a_plain_cascade(build):
    house = build()
    for worker in (house.small, house.large):
        worker.script.capabilities, worker.script.health_status = None, 500
    until(lambda: not any(h.up for h in house.gateway.monitor.by_worker.values()))
    house.small.script.health_status = house.large.script.health_status = 200
    until(house.gateway.monitor.all_up)
    house.small.script.logprob = UNSURE
    response = house.ask()
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-lift"]) == ("large", "unsupported")
