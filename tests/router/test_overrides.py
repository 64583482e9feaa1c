"""What one request decides for itself, by the body key `kvlift`."""

from __future__ import annotations

import pytest

from tests.router.fake_worker import UNSURE


@pytest.mark.parametrize("tier", ["small", "large", "served-large"])
@pytest.mark.parametrize("model", ["kvlift", "always"])
def test_a_tier_pins_whatever_the_policy_is(house, stream, tier, model):
    house.small.script.logprob = UNSURE
    response = house.ask(model=model, stream=stream, kvlift={"tier": tier})
    pinned = tier.removeprefix("served-")
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-reason"]) == (pinned, "pinned")
    assert response.headers["x-kvlift-escalated"] == "false"
    assert (len(house.small.calls), len(house.large.calls)) == ((1, 0) if pinned == "small" else (0, 1))
    assert house.large.lifts == [] and all("logprobs" not in call for call in house.small.calls)


def test_a_tier_may_repeat_the_model(house):
    assert house.ask(model="served-large", kvlift={"tier": "large"}).headers["x-kvlift-tier"] == "large"


def test_a_pinned_tier_may_give_several_answers(house):
    assert len(house.ask(n=3, kvlift={"tier": "small"}).json()["choices"]) == 3
    assert house.ask(n=0, kvlift={"tier": "small"}).status_code == 400


CONFLICTS = {
    "policy": {"policy": "sure"},
    "escalation": {"escalation": "restart"},
    "rho": {"rho": 0.2},
    "coverage": {"coverage": 0.2},
    "selector": {"selector": "random"},
    "lift": {"lift": "require"},
}


@pytest.mark.parametrize("key", CONFLICTS)
@pytest.mark.parametrize("pin", [{"model": "small"}, {"tier": "small"}], ids=["model", "tier"])
def test_what_a_pinned_request_never_does_is_a_400_that_names_the_key(house, key, pin):
    fields = {**pin, "kvlift": {**CONFLICTS[key], **({"tier": pin["tier"]} if "tier" in pin else {})}}
    fields.pop("tier", None)
    response = house.ask(**fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"kvlift.{key}"
    assert f"kvlift.{key}" in response.json()["error"]["message"]
    assert house.small.calls == house.large.calls == []


@pytest.mark.parametrize(
    ("options", "model", "param", "word"),
    [
        ({"tier": "huge"}, "kvlift", "kvlift.tier", "tiers: small, large"),
        ({"tier": "large"}, "small", "kvlift.tier", "another tier"),
        ({"policy": "nobodys"}, "kvlift", "kvlift.policy", "policies: kvlift, sure"),
        ({"escalation": "resume"}, "kvlift", "kvlift.escalation", "'restart' or 'continue'"),
        ({"tier": 3}, "kvlift", "kvlift.tier", "string"),
    ],
)
def test_what_is_not_there_is_a_400_that_says_what_is(house, options, model, param, word):
    error = house.ask(model=model, kvlift=options).json()["error"]
    assert error["param"] == param and word in error["message"]


def test_an_unknown_model_is_a_404_whatever_else_is_asked(house):
    assert house.ask(model="gpt-9", kvlift={"tier": "small"}).status_code == 404


@pytest.mark.parametrize("name", ["kvlift", "sure", "large", "served-large"])
def test_one_model_is_described_as_in_the_list(house, name):
    listed = {model.id: model for model in house.openai.models.list()}
    assert house.openai.models.retrieve(name) == listed[name]
    assert (listed[name].object, listed[name].owned_by) == ("model", "kvlift")


def test_a_name_with_a_slash_is_a_model_too(build):
    house = build(large={"served": "org/large"})
    assert house.http.get("/v1/models/org/large").json()["id"] == "org/large"


def test_an_unknown_model_is_not_described(house):
    response = house.http.get("/v1/models/gpt-9")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
