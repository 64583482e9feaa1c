"""/v1/completions: the same cascade for a prompt that is taken as it stands."""

from __future__ import annotations

import json

import openai
import pytest

from tests.router.conftest import contents, extension
from tests.router.fake_worker import UNSURE, applied

PROMPTS = {"text": "Once upon", "ids": [5, 6, 7]}


@pytest.fixture(params=PROMPTS.values(), ids=PROMPTS)
def prompt(request):
    return request.param


def ask(house, stream, **fields):
    """Text, headers and extension."""
    if stream:
        response, lines = house.stream(**fields)
        assert lines[-1] == "[DONE]"
        return contents(lines), response.headers, extension(lines)
    response = house.ask(**fields)
    return response.json()["choices"][0]["text"], response.headers, response.json()["kvlift"]


@pytest.mark.parametrize(
    ("logprob", "text", "reason"), [(-0.01, "small says", "confident"), (UNSURE, "large says so", "low_confidence")]
)
def test_a_policy_judges_a_completion(house, stream, prompt, logprob, text, reason):
    house.small.script.logprob = logprob
    told, headers, _ = ask(house, stream, prompt=prompt, x_future=1)
    assert (told, headers["x-kvlift-reason"]) == (text, reason)
    body = {"model": "served-small", "prompt": prompt, "x_future": 1, "logprobs": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    assert house.small.calls == [body]


def test_the_lift_is_asked_for_the_same_body(house, stream, prompt):
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    _, headers, _ = ask(house, stream, prompt=prompt, cache_salt="mine")
    assert headers["x-kvlift-lift"] == "applied"
    assert house.large.lifts[0]["request"]["prompt"] == prompt
    assert house.large.calls[0]["extra_key"] == "ns-1" and house.large.calls[0]["prompt"] == prompt


@pytest.mark.parametrize("asked", [None, 0, 1, 3])
@pytest.mark.parametrize("model", ["gap", "sure", "small"])
def test_the_client_sees_the_log_probabilities_that_it_asked_for(house, asked, model):
    fields = {} if asked is None else {"logprobs": asked}
    whole = house.ask(prompt="a", model=model, **fields).json()["choices"][0]["logprobs"]
    _, lines = house.stream(prompt="a", model=model, **fields)
    parts = [c["logprobs"] for line in lines[:-1] for c in json.loads(line)["choices"] if c["text"]]
    if asked is None:
        assert whole is None and set(parts) == {None}
        return
    assert whole["tokens"] == [token for part in parts for token in part["tokens"]] == house.small.script.words
    for told in (whole, *parts):
        assert [len(top) for top in told["top_logprobs"]] == ([asked] * len(told["tokens"]) if asked else [])


def test_the_likeliest_alternatives_reach_the_policy(house, stream):
    """The gap between the fake worker's alternatives is 1."""
    assert ask(house, stream, prompt="a", model="gap")[2]["attempts"][0]["confidence"] == 1.0


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"n": 3}, "n"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [[1], [2]]}, "prompt"),
        ({"echo": True}, "echo"),
    ],
)
def test_case_19_more_than_one_answer_is_refused_with_the_reason_or_forwarded_to_a_pinned_tier(house, fields, key):
    body = {"prompt": "a", **fields}
    error = house.ask(**body).json()["error"]
    assert (error["param"], error["code"]) == (key, "unsupported_value") and f"{key} must be" in error["message"]
    assert house.small.calls == []
    assert house.ask(**body, model="small").status_code == 200
    assert house.small.calls == [{**body, "model": "served-small"}]


def test_continue_adds_the_text_to_a_prompt_of_text(house):
    house.small.script.logprob = UNSURE
    text, _, told = ask(house, True, prompt="Once", model="worst", max_tokens=5, kvlift={"escalation": "continue"})
    assert text == "smalllarge says so" and told["attempts"][0]["outcome"] == "continued"
    assert (house.large.calls[0]["prompt"], house.large.calls[0]["max_tokens"]) == ("Oncesmall", 4)


def test_continue_cannot_add_text_to_token_ids(house):
    house.small.script.logprob = UNSURE
    text, _, told = ask(house, True, prompt=[1, 2], model="worst", kvlift={"escalation": "continue"})
    assert text == "large says so" and "token ids" in told["notes"][0]


@pytest.mark.parametrize("fault", ["error_event", "cut", "bad_json", "done", "abort"])
def test_case_2_a_cut_completion_never_looks_complete(house, fault):
    house.small.script.fault_after, house.small.script.fault = 1, fault
    _, lines = house.stream(prompt="a", model="never")
    assert "error" in json.loads(lines[-1]) and "[DONE]" not in lines
    assert all(not c["finish_reason"] for line in lines for c in json.loads(line).get("choices", []))


def test_case_7_exactly_one_usage_chunk_iff_asked(house):
    for asked in (True, False):
        _, lines = house.stream(prompt="a", stream_options={"include_usage": asked})
        assert sum(not json.loads(line)["choices"] for line in lines[:-1]) == asked


def test_rules_read_the_prompt(build, stream):
    house = build(
        policies={
            "word": {"method": "keywords", "words": ["theorem"]},
            "long": {"method": "length", "characters": 5},
            "tokens": {"method": "length", "characters": None, "tokens": 2},
        },
        default_policy="word",
    )
    for model, prompt, reason in (
        ("word", "a theorem", "keyword"),
        ("word", "a lemma", "no_match"),
        ("word", [1, 2], "no_signal"),  # nobody read it
        ("long", "123456", "prompt_length"),
        ("long", [1, 2], "no_signal"),
        ("tokens", [1, 2], "no_match"),
        ("tokens", [1, 2, 3], "prompt_length"),
    ):
        assert ask(house, stream, model=model, prompt=prompt)[1]["x-kvlift-reason"] == reason


def test_a_question_about_a_completion_cannot_be_asked(build):
    house = build(policies={"it": {"method": "self_verify"}}, default_policy="it")
    _, headers, told = ask(house, False, prompt="a")
    assert headers["x-kvlift-reason"] == "no_verdict" and house.small.checks == []
    assert told["attempts"][0]["check"]["reason"] == "no_conversation"


def test_completions_are_no_conversation(house):
    house.small.script.logprob = UNSURE
    for _ in range(2):
        assert not ask(house, False, prompt="a")[2]["sticky"]


@pytest.mark.parametrize(
    "body", [{"prompt": "a", "logprobs": True}, {"prompt": "a", "logprobs": "3"}, {"prompt": "a", "stream": 1}]
)
def test_a_wrong_type_is_a_400_that_names_the_key(house, body):
    response = house.ask(**body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] in body and house.small.calls == []


def test_errors_of_a_worker_are_openais(house, stream):
    house.small.script.status = 400
    response = house.ask(prompt="a", stream=stream)
    assert response.status_code == 400 and response.json()["error"]["message"] == "no"


def test_the_openai_client_unchanged(house, prompt):
    house.small.script.logprob = UNSURE
    whole = house.openai.completions.create(model="kvlift", prompt=prompt)
    parts = list(house.openai.completions.create(model="kvlift", prompt=prompt, stream=True))
    assert whole.choices[0].text == "".join(part.choices[0].text for part in parts) == "large says so"
    assert (whole.object, whole.model) == (parts[0].object, parts[0].model) == ("text_completion", "served-large")
    with pytest.raises(openai.NotFoundError):
        house.openai.completions.create(model="gpt-9", prompt=prompt)
