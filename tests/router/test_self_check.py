"""The small model is asked about its own answer. Whatever becomes of that call, the request is answered."""

from __future__ import annotations

import pytest

from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import until
from tests.router.test_disconnect import hang_up

YES, NO = {"Yes": -0.1, " no": -2.4}, {"yes": -3.0, "No": -0.05}
ASKS = {
    "policies": {"verify": {"method": "self_verify", "ask": "Sure?", "alternatives": 7}},
    "default_policy": "verify",
}


def asked(house, stream, **fields):
    """The tier, the reason, the text and the first attempt of an answer."""
    if stream:
        response, lines = house.stream(**fields)
        text, told = contents(lines), extension(lines)
    else:
        response = house.ask(**fields)
        text, told = response.json()["choices"][0]["message"]["content"], response.json()["kvlift"]
    headers = response.headers
    return headers["x-kvlift-tier"], headers["x-kvlift-reason"], text, told["attempts"][0]


@pytest.mark.parametrize(
    ("reply", "tier", "reason"),
    [(YES, "small", "verified"), (NO, "large", "self_doubt"), ({"maybe": -0.1}, "large", "no_verdict")],
)
def test_the_reply_keeps_or_escalates(build, stream, reply, tier, reason):
    house = build(**ASKS)
    house.small.script.check = reply
    told = asked(house, stream)
    assert told[:2] == (tier, reason)
    assert told[2] == "".join(getattr(house, tier).script.words)
    assert (told[3]["check"]["outcome"], told[3]["check"]["tokens"]["prompt"]) == ("answered", 11)
    assert (len(house.small.calls), len(house.small.checks), house.large.checks) == (1, 1, [])


def test_the_question_follows_the_whole_answer_and_nothing_steers_its_sampling(build, stream):
    house = build(**ASKS)
    tools, kwargs = [{"type": "function", "function": {"name": "f"}}], {"x": 1}
    steers = {"temperature": 0.7, "stop": ["a"], "response_format": {"type": "json_object"}, "tool_choice": "required"}
    house.ask(stream=stream, tools=tools, chat_template_kwargs=kwargs, cache_salt="tenant", max_tokens=50, **steers)
    assert house.small.checks == [
        {
            "model": "served-small",
            "messages": [
                *MESSAGES, {"role": "assistant", "content": "small says"}, {"role": "user", "content": "Sure?"},
            ],
            "tools": tools,
            "chat_template_kwargs": {"x": 1, "enable_thinking": False},
            "cache_salt": "tenant",
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 7,
        }
    ]  # fmt: skip


def test_the_answers_tool_calls_are_judged_too(build):
    house = build(**ASKS)
    house.small.script.words, house.small.script.check = [], YES
    function = {"name": "f", "arguments": "{}"}
    house.small.script.deltas = [{"tool_calls": [{"id": "x", "function": function}]}]
    assert asked(house, False)[1] == "verified"
    (check,) = house.small.checks
    assert check["messages"][-2]["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]


def test_a_failed_question_escalates_and_is_counted(build, stream):
    house = build(**ASKS)
    house.small.script.check, house.small.script.check_status = YES, 500
    tier, reason, text, first = asked(house, stream)
    assert (tier, reason, text) == ("large", "no_verdict", "large says so")
    assert (first["check"]["outcome"], first["check"]["reason"]) == ("failed", "upstream_500")
    assert house.http.get("/ready").json()["counters"]["checks_failed"] == 1


@pytest.mark.parametrize(("calls", "checks", "tier"), [(1, 0, None), (2, 0, "large"), (3, 1, "small")])
def test_a_question_is_a_call_and_never_takes_the_last_one(build, stream, calls, checks, tier):
    house = build(limits={"max_calls": calls}, **ASKS)
    house.small.script.check = YES
    response = house.ask(stream=stream)
    assert len(house.small.checks) == checks
    assert response.status_code == (200 if tier else 503)
    if tier:
        assert response.headers["x-kvlift-tier"] == tier


def test_a_question_is_not_retried_at_the_cost_of_the_last_call(build, stream):
    house = build(limits={"max_calls": 3, "retries": 2}, **ASKS)
    house.small.script.check_status = 503
    assert asked(house, stream)[:2] == ("large", "no_verdict")
    assert len(house.small.checks) == 1


def test_an_empty_answer_needs_no_question(build, stream):
    house = build(**ASKS)
    house.small.script.words, house.small.script.check = [], YES
    assert asked(house, stream)[:2] == ("large", "empty_answer")
    assert house.small.checks == []


def test_hanging_up_while_the_question_runs_ends_it(build, stream):
    house = build(**ASKS)
    house.small.script.check_s = 5.0
    hang_up(house, lambda: house.small.checks, stream=stream)
    until(lambda: house.gateway.idle)
    assert house.large.calls == []


def test_a_combination_asks_only_where_its_other_parts_leave_it_open(build, stream):
    unsure = {"method": "avg_logprob", "threshold": -1.0}
    both = {"method": "all", "of": [unsure, {"method": "self_verify"}]}
    house = build(policies={"both": both}, default_policy="both")
    house.small.script.check = NO
    assert asked(house, stream)[1] == "confident" and house.small.checks == []
    house.small.script.logprob = -3.0
    assert asked(house, stream)[1] == "self_doubt" and len(house.small.checks) == 1
    house.small.script.check = YES
    assert asked(house, stream)[1] == "verified"
