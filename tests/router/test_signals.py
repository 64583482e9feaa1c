"""Every signal of the policies reaches them: each changes a decision, streamed as buffered."""

from __future__ import annotations

import json

import pytest

from tests.router.conftest import extension
from tests.router.fake_worker import UNSURE, until
from tests.router.test_disconnect import hang_up

UNSURE_OF_IT = {"method": "avg_logprob", "threshold": -1.0}
TOOL = {"type": "function", "function": {"name": "find"}}


def say(text):
    return [{"role": "user", "content": text}]


def reason(house, stream, **fields):
    response = house.ask(stream=stream, **fields)
    assert response.status_code == 200
    return response.headers["x-kvlift-reason"]


def only(policy, **parts):
    return {"policies": {"it": policy}, "default_policy": "it", **parts}


def test_text_is_the_last_user_message(build, stream):
    house = build(**only({"method": "keywords", "words": ["theorem"]}))
    earlier = [*say("a theorem"), {"role": "assistant", "content": "a theorem"}]
    assert reason(house, stream, messages=[*earlier, *say("thanks")]) == "no_match"
    assert reason(house, stream, messages=[*earlier, *say("the Theorem?")]) == "keyword"
    assert len(house.small.calls) == 1


@pytest.mark.parametrize(
    ("policy", "good", "bad", "word"),
    [
        ({"method": "refusal"}, ["Of", " course"], ["I ca", "n't help"], "refusal"),
        ({"method": "answer_regex", "pattern": "un.*sure"}, ["sure"], ["un", "sure"], "answer_pattern"),
        ({"method": "empty"}, ["x"], [" ", "\n"], "empty_answer"),
        ({"method": "loop", "tokens": 8}, ["a", "b", "c", "d", "e"] * 2, ["a"] * 9, "loop"),
    ],
)
def test_the_answers_text_and_tokens(build, stream, policy, good, bad, word):
    house = build(**only(policy))
    house.small.script.words = good
    assert reason(house, stream) == "no_match"
    house.small.script.words = bad
    assert reason(house, stream) == word


def test_json_that_is_asked_for(build, stream):
    house = build(**only({"method": "invalid_json"}))
    house.small.script.words = ["{", '"a": 1', "}"]
    assert reason(house, stream, response_format={"type": "json_object"}) == "no_match"
    house.small.script.words = ["{", '"a": 1']
    assert reason(house, stream, response_format={"type": "json_object"}) == "invalid_json"


def test_the_answers_tool_calls_and_the_offered_ones(build, stream):
    house = build(**only({"method": "invalid_tool_call"}))
    house.small.script.words = []

    def call(name, *arguments):
        whole = [{"id": "1", "function": {"name": name, "arguments": "".join(arguments)}}]
        parts = [{"index": 0, "function": {"name": name, "arguments": ""}}]
        parts += [{"index": 0, "function": {"arguments": part}} for part in arguments]
        house.small.script.deltas = [{"tool_calls": [p]} for p in parts] if stream else [{"tool_calls": whole}]
        return reason(house, stream, tools=[TOOL])

    assert call("find", '{"a"', ": 1}") == "no_match"
    assert call("find", '{"a"') == "invalid_arguments"
    assert call("lose", "{}") == "unknown_tool"


def test_the_answer_limit_lets_an_early_decision_be_certain(build):
    house = build(limits={"attempt_s": 0.4})
    house.small.script.logprob = UNSURE
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    assert reason(house, True, max_tokens=2) == "low_confidence"
    assert reason(house, True) == "attempt_timeout"  # with more tokens to come it could still be confident


def test_prompt_tokens_are_known_once_a_tier_has_counted_them(build_three, stream):
    def longer_than(tokens):
        return {"method": "all", "of": [UNSURE_OF_IT, {"method": "length", "characters": None, "tokens": tokens}]}

    house = build_three(policies={"over-10": longer_than(10), "over-11": longer_than(11)}, default_policy="over-10")
    house.small.script.logprob = house.middle.script.logprob = UNSURE
    assert house.ask(stream=stream).headers["x-kvlift-tier"] == "large"
    assert house.ask(stream=stream, model="over-11").headers["x-kvlift-tier"] == "middle"


def test_a_tier_that_is_down_is_seen(build, stream):
    house = build(**only({"method": "all", "of": [UNSURE_OF_IT, {"method": "tier_ready"}]}))
    house.small.script.logprob = UNSURE
    assert reason(house, stream) == "low_confidence"
    house.large.script.health_status = 500
    until(lambda: not house.gateway.monitor["large"].up)
    assert reason(house, stream) == "target_down"


def test_requests_in_flight_are_seen_and_not_after_their_end(build, stream):
    house = build(**only({"method": "tier_busy", "in_flight": 1}))
    assert reason(house, stream) == reason(house, stream) == "no_match"
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    asked = []

    def busy():
        if house.small.running == 1 and not asked:
            asked.append(reason(house, stream))
        return bool(asked)

    hang_up(house, busy, stream=True)
    assert asked == ["tier_busy"]
    until(lambda: house.gateway.idle)
    assert house.http.get("/ready").json()["tiers"]["small"]["in_flight"] == 0


def test_what_waits_in_a_worker_is_seen_where_it_tells(build, stream):
    policy = {"method": "all", "of": [UNSURE_OF_IT, {"method": "tier_ready", "tier": "large", "queued": 3}]}
    house = build(**only(policy))
    house.small.script.logprob = UNSURE
    assert reason(house, stream) == "no_signal"
    for waiting, word in ((2, "low_confidence"), (3, "target_busy")):
        house.large.script.queued = waiting
        until(lambda w=waiting: house.http.get("/ready").json()["tiers"]["large"]["queued"] == w)
        assert reason(house, stream) == word


@pytest.mark.parametrize(("calls", "tier"), [(1, "middle"), (2, "large")])
def test_calls_that_were_made_are_counted(build_three, stream, calls, tier):
    permitted = {"method": "budget", "share": None, "calls": calls}
    house = build_three(**only({"method": "all", "of": [UNSURE_OF_IT, permitted]}))
    house.small.script.logprob = house.middle.script.logprob = UNSURE
    assert house.ask(stream=stream).headers["x-kvlift-tier"] == tier


def test_the_recent_share_of_escalated_requests_stays_under_its_budget(build):
    house = build(**only({"method": "all", "of": [UNSURE_OF_IT, {"method": "budget", "share": 0.25}]}))
    house.small.script.logprob = UNSURE
    escalated = 0
    for asked in range(24):
        may = escalated < 0.25 * asked or asked == 0
        assert reason(house, asked % 2 == 1) == ("low_confidence" if may else "share_spent")
        escalated += may
    assert escalated == 6
    house.ask(model="large")  # a pinned request is no policy's: with it the share would be 6 of 25
    assert reason(house, False) == "share_spent"


def test_a_policy_with_a_memory_is_told_the_tier(build):
    house = build(**only({"method": "target_rate"}))
    house.ask()
    rate = house.gateway.config.policies["it"]
    assert (len(rate.seen("small")), len(rate.seen(""))) == (1, 0)


def test_the_decision_is_the_same_streamed_and_buffered(house):
    house.small.script.logprob = UNSURE
    buffered, (_, lines) = house.ask().json()["kvlift"], house.stream()
    streamed = extension(lines)
    for told in (buffered, streamed):
        for attempt in told["attempts"]:
            del attempt["ms"]
    assert json.dumps(buffered, sort_keys=True) == json.dumps(streamed, sort_keys=True)
