"""The cross-model KV headers of vLLM's semantic router: hints in, what became of them out."""

from __future__ import annotations

import pytest

from router.hints import Hints
from tests.router.conftest import MESSAGES
from tests.router.fake_worker import UNSURE, applied

STATUS = "x-vsr-kv-transfer-status"


def hints(source=None, pack=None, cache=None):
    told = {"x-vsr-kv-source-pod": source, "x-vsr-kv-mapper-id": pack, "x-vsr-kv-cache-id": cache}
    return {name: value for name, value in told.items() if value is not None}


@pytest.fixture
def ready(house):
    house.large.script.lift = applied()
    return house


@pytest.mark.parametrize("model", ["kvlift", "never", "large", "served-large"])
def test_the_request_goes_to_the_large_model_with_the_kv_of_the_pod_that_is_named(ready, stream, model):
    response = ready.ask(hints("small"), model=model, stream=stream, cache_salt="mine")
    assert "large" in response.text and response.headers[STATUS] == "applied"
    assert response.headers["x-kvlift-reason"] == ("pinned" if "large" in model else "kv_hint")
    assert ready.small.calls == []
    assert ready.large.lifts[0]["source"] == {"url": ready.small.address, "api_key": None, "cache_salt": "mine"}
    assert ready.large.calls[0]["extra_key"] == "ns-1"


@pytest.mark.parametrize("form", ["{}", "{}/", "tier", "host and port"])
def test_a_pod_is_named_by_tier_or_address(ready, form):
    address = ready.small.address
    names = {"tier": "small", "host and port": address.removeprefix("http://")}
    assert ready.ask(hints(names.get(form) or form.format(address))).headers[STATUS] == "applied"


@pytest.mark.parametrize(
    ("headers", "word"),
    [
        (hints("http://10.0.0.9:1"), "no worker"),
        (hints("http://169.254.169.254/latest"), "no worker"),
        (hints("smal"), "no worker"),
        (hints(""), "no worker"),
        (hints(pack="small-to-large"), "no worker"),
        (hints(cache="c-1"), "no worker"),
        (hints("small", pack="other"), "no such pack"),
        (hints("large"), "no such pack"),
    ],
)
def test_a_hint_that_leads_nowhere_is_unsupported_noted_and_changes_nothing(ready, stream, headers, word):
    response = ready.ask(headers, stream=stream)
    assert (response.status_code, response.headers[STATUS]) == (200, "unsupported")
    assert response.headers["x-kvlift-tier"] == "small" and "small" in response.text
    assert ready.large.lifts == [] and word in response.text


def test_nobody_but_the_configured_workers_is_asked(ready, monkeypatch):
    """A lift asks the target to pull from the source: an address of the client's never gets there."""
    ready.small.script.logprob = UNSURE
    response = ready.ask(hints("http://10.0.0.9:1"))
    assert response.headers[STATUS] == "unsupported"  # though the router's own lift was applied
    assert response.headers["x-kvlift-lift"] == "applied"
    assert [lift["source"]["url"] for lift in ready.large.lifts] == [ready.small.address]


@pytest.mark.parametrize("pack", ["small-to-large", None])
def test_the_mapper_is_a_pack_of_the_config(ready, pack):
    ready.ask(hints("small", pack))
    assert ready.large.lifts[0]["pack"] == "small-to-large"


def test_the_cache_id_is_not_used(ready):
    """It could be another tenant's salt."""
    ready.ask(hints("small", cache="someone"), cache_salt="mine")
    assert "someone" not in str(ready.large.lifts) + str(ready.large.calls)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ({"lift": applied(status="fallback_prefill", namespace=None, reason="evicted")}, "fallback_reprefill"),
        ({"lift_status": 500}, "fallback_reprefill"),
        ({"lift": applied(status="unsupported", namespace=None, reason="rope")}, "unsupported"),
    ],
)
def test_a_transfer_that_fails_is_answered_natively_and_told(ready, stream, script, status):
    for key, value in script.items():
        setattr(ready.large.script, key, value)
    response = ready.ask(hints("small"), stream=stream)
    assert (response.status_code, response.headers[STATUS]) == (200, status)
    assert "extra_key" not in ready.large.calls[0]


def test_a_lift_that_the_client_forbids_is_not_made(ready):
    response = ready.ask(hints("small"), kvlift={"lift": "never"})
    assert (response.headers[STATUS], response.headers["x-kvlift-tier"]) == ("unsupported", "large")
    assert ready.large.lifts == []


@pytest.mark.parametrize("model", ["kvlift", "always", "small"])
def test_without_hints_there_is_no_status(ready, stream, model):
    assert STATUS not in ready.ask(model=model, stream=stream).headers


def test_a_pinned_small_model_has_nothing_to_lift_to(ready):
    response = ready.ask(hints("small"), model="small")
    assert (response.headers[STATUS], response.headers["x-kvlift-tier"]) == ("unsupported", "small")


def test_the_mapper_chooses_among_the_tiers(build_three):
    house = build_three()
    house.middle.script.lift = house.large.script.lift = applied()
    assert house.ask(hints("small", "small-to-middle")).headers["x-kvlift-tier"] == "middle"
    assert house.ask(hints("small")).headers["x-kvlift-tier"] == "large"
    assert house.ask(hints("middle")).headers["x-kvlift-tier"] == "large"
    assert house.large.lifts[-1]["source"]["url"] == house.middle.address


def test_hints_win_over_the_seat_of_a_conversation(ready):
    ready.small.script.logprob = UNSURE
    text = ready.ask().json()["choices"][0]["message"]["content"]
    turn = [*MESSAGES, {"role": "assistant", "content": text}, {"role": "user", "content": "?"}]
    assert ready.ask(hints("small"), messages=turn).headers["x-kvlift-reason"] == "kv_hint"


def test_headers_are_read_as_they_are():
    assert Hints.read({}) is None
    assert Hints.read({"x-vsr-kv-source-pod": " a "}) == ("a", None)
    assert Hints.read({"x-vsr-kv-mapper-id": "m", "x-vsr-kv-cache-id": "c"}) == (None, "m")
