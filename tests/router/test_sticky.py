"""A conversation that was escalated stays on the tier that answered it."""

from __future__ import annotations

import pytest

from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import UNSURE, applied, until

TOOL_CALL = {"index": 0, "id": "call_9", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def next_turn(answer, before=MESSAGES):
    message = {"role": "assistant", "content": answer} if isinstance(answer, str) else answer
    return [*before, message, {"role": "user", "content": "And then?"}]


@pytest.fixture
def house(build):
    """One of its own for each test: a conversation of another one is still known there."""
    return build()


@pytest.fixture
def lifted(house):
    house.small.script.logprob, house.large.script.lift = UNSURE, applied(namespace="ns-7")
    return house


def ask(house, stream, **fields):
    """The answer's text, the headers and the extension."""
    if stream:
        response, lines = house.stream(**fields)
        return contents(lines), response.headers, extension(lines)
    response = house.ask(**fields)
    return response.json()["choices"][0]["message"]["content"], response.headers, response.json()["kvlift"]


def test_the_next_turn_goes_straight_to_the_large_model_and_its_lifted_kv(lifted, stream):
    messages = MESSAGES
    text, _, told = ask(lifted, stream)
    assert not told["sticky"]
    for turn in range(3):  # each turn prolongs it
        messages = next_turn(text, messages)
        text, headers, told = ask(lifted, stream, messages=messages)
        assert text == "large says so" and told["sticky"]
        assert (headers["x-kvlift-tier"], headers["x-kvlift-reason"]) == ("large", "sticky")
        assert headers["x-kvlift-escalated"] == "true" and headers["x-kvlift-lift"] == "none"
        assert [attempt["tier"] for attempt in told["attempts"]] == ["large"]
        assert lifted.large.calls[-1]["extra_key"] == "ns-7"
        assert len(lifted.large.calls) == turn + 2
    assert (len(lifted.small.calls), len(lifted.large.lifts)) == (1, 1)


def test_an_answer_that_was_not_lifted_is_sticky_too_and_native(house):
    house.small.script.logprob = UNSURE
    text, _, _ = ask(house, False)
    assert ask(house, False, messages=next_turn(text), cache_salt=None)[2]["sticky"]
    assert "extra_key" not in house.large.calls[-1]


def test_a_kept_answer_and_a_pinned_one_seat_nobody(house):
    for fields in ({}, {"model": "large"}):
        text, _, _ = ask(house, False, **fields)
        assert not ask(house, False, messages=next_turn(text))[2]["sticky"]


def test_the_same_question_again_is_another_conversation(lifted):
    ask(lifted, False)
    assert not ask(lifted, False)[2]["sticky"]
    assert not ask(lifted, False, messages=next_turn("something else"))[2]["sticky"]


def test_an_answer_is_known_however_the_client_writes_it_back(lifted):
    text, _, _ = ask(lifted, False)
    for message in (
        {"role": "assistant", "content": f" {text}\n", "refusal": None, "tool_calls": None},
        {"content": text, "role": "assistant", "reasoning_content": "hm", "annotations": []},
    ):
        assert ask(lifted, False, messages=next_turn(message))[2]["sticky"]


def test_a_tool_call_is_an_answer(lifted, stream):
    lifted.large.script.words, lifted.large.script.deltas = [], [{"tool_calls": [TOOL_CALL]}]
    lifted.large.script.finish_reason = "tool_calls"
    tools = [{"type": "function", "function": {"name": "f"}}]
    ask(lifted, stream, tools=tools)
    called = {"role": "assistant", "content": None, "tool_calls": [{**TOOL_CALL, "id": "other"}]}
    turn = [*MESSAGES, called, {"role": "tool", "tool_call_id": "other", "content": "42"}]
    assert ask(lifted, stream, messages=turn, tools=tools)[2]["sticky"]
    assert not ask(lifted, stream, messages=[*MESSAGES, {**called, "tool_calls": []}, turn[-1]], tools=tools)[2][
        "sticky"
    ]


@pytest.mark.parametrize(
    "other", [{"model": "worst"}, {"cache_salt": "b"}, {"kvlift": {"rho": 0.5}}, {"kvlift": {"lift": "never"}}]
)
def test_case_44_another_policy_salt_or_way_to_lift_finds_no_seat(lifted, other):
    text, _, _ = ask(lifted, False, cache_salt="a")
    told = ask(lifted, False, messages=next_turn(text), **{"cache_salt": "a", **other})[2]
    assert not told["sticky"]


def test_the_alias_is_its_policy(lifted):
    text, _, _ = ask(lifted, False, model="kvlift")
    assert ask(lifted, False, model="sure", messages=next_turn(text))[2]["sticky"]


def test_a_required_lift_is_made_and_a_pinned_tier_is_asked(lifted):
    text, _, _ = ask(lifted, False, kvlift={"lift": "require"})
    turn = next_turn(text)
    assert ask(lifted, False, messages=turn, kvlift={"lift": "require"})[1]["x-kvlift-lift"] == "applied"
    assert ask(lifted, False, messages=turn, model="small")[1]["x-kvlift-tier"] == "small"


def test_an_answer_that_failed_seats_nobody(lifted):
    lifted.large.script.fault_after = 1
    lifted.stream()
    lifted.large.script.fault_after = None
    assert not ask(lifted, False, messages=next_turn("large"))[2]["sticky"]


def test_zero_seconds_turn_it_off(build):
    house = build(sticky_s=0)
    house.small.script.logprob = UNSURE
    text, _, _ = ask(house, False)
    assert not ask(house, False, messages=next_turn(text))[2]["sticky"]


def test_a_tier_that_is_down_gives_its_conversations_back(build):
    house = build()
    house.small.script.logprob = UNSURE
    text, _, _ = ask(house, False)
    house.large.script.health_status = 500
    until(lambda: not house.gateway.fleets["large"].up)
    house.small.script.logprob = -0.01
    assert ask(house, False, messages=next_turn(text))[0] == "small says"


def test_a_seat_in_the_middle_is_judged_and_goes_up_from_there(build_three):
    house = build_three(policies={"it": {"method": "avg_logprob", "threshold": -1.0}}, default_policy="it")
    house.small.script.logprob = UNSURE
    text, _, _ = ask(house, False)
    assert text == "middle says"
    turn = next_turn(text)
    assert ask(house, False, messages=turn)[0] == "middle says" and len(house.small.calls) == 1
    house.middle.script.logprob = UNSURE
    text, _, told = ask(house, False, messages=turn)
    assert text == "large says so" and told["sticky"] and len(house.small.calls) == 1
    assert ask(house, False, messages=next_turn(text, turn))[1]["x-kvlift-tier"] == "large"


def test_a_sticky_request_is_none_that_the_policy_judged(build):
    """Else a budget on the share of escalated requests would count a conversation's every turn."""
    budget = {"method": "all", "of": [{"method": "always"}, {"method": "budget", "share": 0.9}]}
    house = build(policies={"it": budget}, default_policy="it")
    messages = MESSAGES
    for _ in range(20):
        text, _, _ = ask(house, False, messages=messages)
        messages = next_turn(text, messages)
    assert len(house.small.calls) == 1
    assert ask(house, False)[1]["x-kvlift-reason"] == "share_spent"
