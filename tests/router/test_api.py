"""The API as clients see it: the openai client unchanged, the model list, keys, errors."""

from __future__ import annotations

import openai
import pytest

from tests.router.conftest import MESSAGES
from tests.router.fake_worker import UNSURE, applied

SECRETS = ("worker-secret", "client-key")


@pytest.mark.parametrize(
    ("logprob", "text", "served"), [(-0.01, "small says", "served-small"), (UNSURE, "large says so", "served-large")]
)
def test_the_openai_client_unchanged(house, logprob, text, served):
    house.small.script.logprob = logprob
    answer = house.openai.chat.completions.create(model="kvlift", messages=MESSAGES)
    assert (answer.choices[0].message.content, answer.model, answer.choices[0].finish_reason) == (text, served, "stop")
    assert answer.usage.total_tokens > 0


@pytest.mark.parametrize(
    ("logprob", "text", "served"), [(-0.01, "small says", "served-small"), (UNSURE, "large says so", "served-large")]
)
@pytest.mark.parametrize("usage", [True, False])
def test_the_openai_client_unchanged_streamed(house, logprob, text, served, usage):
    house.small.script.logprob = logprob
    chunks = list(
        house.openai.chat.completions.create(
            model="kvlift",
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": usage},
            extra_body={"kvlift": {"debug": True}},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert {c.model for c in chunks} == {served}
    assert [c for c in chunks if c.usage] == (chunks[-1:] if usage else [])
    assert chunks[-1].model_extra["kvlift"]["tier"] == served.removeprefix("served-")


def test_the_openai_client_sees_an_error_in_the_stream(house):
    house.small.script.fault_after, house.small.script.fault = 1, "cut"
    stream = house.openai.chat.completions.create(model="small", messages=MESSAGES, stream=True)
    with pytest.raises(openai.APIError, match="cut"):
        list(stream)


def test_the_openai_client_sees_an_unknown_model(house):
    with pytest.raises(openai.NotFoundError, match="names: kvlift, sure") as caught:
        house.openai.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_the_openai_client_sees_a_deterministic_400(house):
    house.small.script.status = 400
    with pytest.raises(openai.BadRequestError, match="no"):
        house.openai.chat.completions.create(model="kvlift", messages=MESSAGES)


def test_models_lists_the_alias_policies_and_tiers_and_each_name_works(house):
    names = {model.id: model.model_extra["kvlift"]["kind"] for model in house.openai.models.list()}
    policies = dict.fromkeys(("kvlift", "sure", "worst", "gap", "always", "never"), "policy")
    tiers = dict.fromkeys(("small", "served-small", "large", "served-large"), "tier")
    assert names == {**policies, **tiers}
    assert {house.ask(model=name).status_code for name in names} == {200}


@pytest.mark.parametrize("stream", [True, False])
def test_a_pinned_tier_never_escalates(house, stream):
    house.small.script.logprob = UNSURE
    response = house.ask(model="small", stream=stream)
    assert (response.headers["x-kvlift-reason"], response.headers["x-kvlift-escalated"]) == ("pinned", "false")
    assert "logprobs" not in house.small.calls[0]
    assert house.ask(model="large").headers["x-kvlift-tier"] == "large"
    assert len(house.small.calls) == 1


def test_case_63_a_worker_sees_its_own_key_and_never_the_clients(build, monkeypatch, caplog):
    monkeypatch.setenv("LARGE_KEY", "worker-secret")
    caplog.set_level("DEBUG")
    house = build(large={"api_key_env": "LARGE_KEY"})
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    house.http.post(
        "/v1/chat/completions",
        json={"model": "kvlift", "messages": MESSAGES},
        headers={"authorization": "Bearer client-key"},
    )
    assert {headers.get("authorization") for _, headers in house.small.headers} == {None}
    seen = {path: headers.get("authorization") for path, headers in house.large.headers}
    # case 64: health and introspection carry it too
    assert seen == dict.fromkeys(
        ("/health", "/kv/capabilities", "/v1/loads", "/kv/lift", "/v1/chat/completions"), "Bearer worker-secret"
    )
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("router")]
    assert ours and not any(secret in line for secret in SECRETS for line in ours)
    assert house.http.get("/ready").text.count("secret") == 0


def test_case_63_the_source_key_goes_to_the_worker_that_pulls_from_it(build, monkeypatch):
    monkeypatch.setenv("SMALL_KEY", "worker-secret")
    house = build(small={"api_key_env": "SMALL_KEY"})
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    house.ask()
    assert house.large.lifts[0]["source"]["api_key"] == "worker-secret"


def test_an_unknown_path_is_an_openai_error(house):
    response = house.http.get("/v1/nothing")
    assert response.status_code == 404 and response.json()["error"]["type"] == "invalid_request_error"
    assert house.http.get("/v1/chat/completions").status_code == 405


def test_health_is_the_routers_own(house):
    assert house.http.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("fields", "key", "least", "most"),
    [
        ({}, "n", 1, 128),
        ({"prompt": "a"}, "n", 1, 128),
        ({"logprobs": True}, "top_logprobs", 0, 20),
        ({"prompt": "a"}, "logprobs", 0, 20),
    ],
)
def test_a_number_for_which_a_worker_would_make_any_room_is_bounded(house, fields, key, least, most):
    """A worker takes n as it comes: a thousand million answers to one request are its end."""
    for value in (least, most):
        assert house.ask(**fields, **{key: value}, model="small").status_code == 200
    calls = len(house.small.calls)
    for value in (least - 1, most + 1, 10**12):
        response = house.ask(**fields, **{key: value}, model="small")
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"]) == (key, "invalid_value") and f"{least} to {most}" in error["message"]
    assert len(house.small.calls) == calls
