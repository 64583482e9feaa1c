"""`escalation: continue`: the next tier goes on with what the last one said, and the client sees one answer."""

from __future__ import annotations

import json

import pytest

from router.events import AnswerEvent
from router.partial import begin
from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import UNSURE, applied

CONTINUE = {"escalation": "continue"}
TEXT = {"role": "assistant", "content": "one two"}


@pytest.fixture
def early(house):
    """The small model is left at its second token; the third is never said."""
    house.small.script.words = ["one", " two", " three"]
    house.small.script.words_per_event = 2
    house.small.script.logprob = UNSURE
    return house


def choices(lines):
    return [c for line in lines if line != "[DONE]" for c in json.loads(line)["choices"]]


def outcomes(told):
    return [attempt["outcome"] for attempt in told["attempts"]]


@pytest.mark.parametrize("usage", [True, False])
def test_the_client_sees_one_clean_stream(early, usage):
    response, lines = early.stream(model="worst", kvlift=CONTINUE, stream_options={"include_usage": usage})
    assert contents(lines) == "one twolarge says so"
    events = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]" and lines.count("[DONE]") == 1
    assert [c["delta"].get("role") for c in choices(lines)] == ["assistant", *[None] * (len(choices(lines)) - 1)]
    assert [c["finish_reason"] for c in choices(lines) if c["finish_reason"]] == ["stop"]
    assert {(e["id"], e["model"]) for e in events} == {("id-served-large", "served-large")}
    assert [e["usage"]["completion_tokens"] for e in events if e.get("usage")] == ([3] if usage else [])
    assert (response.headers["x-kvlift-tier"], response.headers["x-kvlift-reason"]) == ("large", "low_confidence")
    told = extension(lines)
    assert outcomes(told) == ["continued", "answered"] and told["notes"] == []
    assert told["attempts"][0]["tokens"]["completion"] == 2


def test_the_large_worker_is_sent_the_partial_answer_and_so_is_its_lift(early):
    early.large.script.lift = applied()
    early.stream(model="worst", kvlift=CONTINUE, max_tokens=9, max_completion_tokens=8, min_tokens=1, x_future=1)
    shared = {
        "model": "served-large",
        "messages": [*MESSAGES, TEXT],
        "continue_final_message": True,
        "max_tokens": 7,  # what the two tokens of the small model leave
        "max_completion_tokens": 6,
        "min_tokens": 0,
        "x_future": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert early.large.calls == [{**shared, "extra_key": "ns-1"}]
    assert early.large.lifts[0]["request"] == shared


@pytest.mark.parametrize("asked", [None, 0, 2])
def test_log_probabilities_are_those_of_the_tokens_that_are_shown(early, asked):
    fields = {} if asked is None else {"logprobs": True, "top_logprobs": asked}
    _, lines = early.stream(model="worst", kvlift=CONTINUE, **fields)
    entries = [entry for c in choices(lines) for entry in (c["logprobs"] or {}).get("content", [])]
    assert "".join(entry["token"] for entry in entries) == ("" if asked is None else "one twolarge says so")
    assert {len(entry["top_logprobs"]) for entry in entries} == (set() if asked is None else {asked})


def test_tokens_are_counted_for_a_policy_that_reads_none(early):
    """Without their log-probabilities a chunk of two tokens would count as one."""
    early.stream(model="always", kvlift=CONTINUE, max_tokens=9)
    assert early.small.calls[0]["logprobs"] is True
    assert early.large.calls[0]["max_tokens"] == 7


def test_the_config_may_choose_it_and_a_request_may_choose_otherwise(build):
    house = build(escalation="continue")
    house.small.script.logprob = UNSURE
    assert contents(house.stream(model="worst")[1]) == "smalllarge says so"
    assert contents(house.stream(model="worst", kvlift={"escalation": "restart"})[1]) == "large says so"


def test_restart_is_the_default_and_adds_no_log_probabilities(early):
    assert contents(early.stream(model="always")[1]) == "large says so"
    assert "logprobs" not in early.small.calls[0]


RESTARTS = {
    "response_format": ({"response_format": {"type": "json_object"}}, "response_format"),
    "grammar": ({"regex": "a+"}, "regex"),
    "their own": ({"continue_final_message": True}, "continue_final_message"),
}


@pytest.mark.parametrize("kind", RESTARTS)
def test_what_cannot_be_continued_is_answered_anew_and_noted(early, kind):
    fields, word = RESTARTS[kind]
    _, lines = early.stream(model="worst", kvlift=CONTINUE, **fields)
    assert contents(lines) == "large says so"
    (note,) = extension(lines)["notes"]
    assert word in note and outcomes(extension(lines)) == ["discarded", "answered"]
    assert early.large.calls[0]["messages"] == MESSAGES


def test_text_is_no_constraint(early):
    assert contents(early.stream(model="worst", kvlift=CONTINUE, response_format={"type": "text"})[1])[:3] == "one"


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]},
        {"reasoning_content": "hm"},
    ],
)
def test_only_plain_text_is_continued(house, delta):
    house.small.script.deltas = [delta, {"content": "x"}]
    _, lines = house.stream(model="always", kvlift=CONTINUE)
    assert contents(lines) == "large says so" and "plain text" in extension(lines)["notes"][0]
    assert all(not c["delta"].get(key) for c in choices(lines) for key in delta)


def test_a_complete_answer_is_not_continued(house):
    house.small.script.logprob = UNSURE
    _, lines = house.stream(kvlift=CONTINUE)
    assert contents(lines) == "large says so" and "complete" in extension(lines)["notes"][0]


def test_a_buffered_answer_is_not_continued(early):
    told = early.ask(model="worst", kvlift=CONTINUE).json()
    assert told["choices"][0]["message"]["content"] == "large says so"
    assert "buffered" in told["kvlift"]["notes"][0]


def test_a_failed_attempt_is_not_continued(early):
    early.small.script.fault_after = 1
    _, lines = early.stream(model="sure", kvlift=CONTINUE)
    assert contents(lines) == "large says so" and extension(lines)["notes"] == []


@pytest.mark.parametrize("fault", ["error_event", "cut"])
def test_case_2_a_continued_answer_that_dies_never_looks_complete(early, fault):
    early.large.script.fault_after, early.large.script.fault = 1, fault
    _, lines = early.stream(model="worst", kvlift=CONTINUE)
    assert "error" in json.loads(lines[-1]) and "[DONE]" not in lines
    assert not any(c["finish_reason"] for line in lines for c in json.loads(line).get("choices", []))


def test_nothing_is_shown_where_nobody_can_go_on(early):
    early.large.script.status = 500
    response = early.ask(stream=True, model="worst", kvlift=CONTINUE)
    assert response.status_code == 502 and "one two" not in response.text


def test_three_tiers_say_one_answer(build_three):
    house = build_three(policies={"it": {"method": "min_window", "threshold": -1.0, "window": 1}}, default_policy="it")
    house.small.script.logprob = house.middle.script.logprob = UNSURE
    _, lines = house.stream(kvlift=CONTINUE)
    assert contents(lines) == "smallmiddlelarge says so"
    assert outcomes(extension(lines)) == ["continued", "continued", "answered"]
    assert house.large.calls[0]["messages"][-1] == {"role": "assistant", "content": "smallmiddle"}
    assert [bool(c["delta"].get("role")) for c in choices(lines)].count(True) == 1


def test_what_was_taken_over_counts_as_discarded_once_a_later_tier_starts_anew(build_three):
    policy = {"method": "any", "of": [{"method": "min_window", "threshold": -1.0, "window": 1}, {"method": "refusal"}]}
    house = build_three(policies={"it": policy}, default_policy="it")
    house.small.script.logprob, house.small.script.words = UNSURE, ["I cannot"]
    house.small.script.words += [" help"]
    house.middle.script.words = [" help", " you"]  # only with what came before it does it refuse
    _, lines = house.stream(kvlift=CONTINUE)
    assert contents(lines) == "large says so"
    assert outcomes(extension(lines)) == ["discarded", "discarded", "answered"]
    assert house.large.calls[0]["messages"] == MESSAGES


def event(text, **choice):
    return AnswerEvent(json.dumps({"choices": [{"index": 0, "delta": {"content": text}, **choice}]}))


@pytest.mark.parametrize(
    ("held", "limit", "word"),
    [
        ([], None, "nothing was said"),
        ([event("")], None, "nothing was said"),
        ([event("a", finish_reason="length")], None, "complete"),
        ([event("a"), event("b")], 2, "no token is left"),
    ],
)
def test_why_an_answer_cannot_be_continued(held, limit, word):
    assert word in begin(None, held, limit)


def test_parts_add_up():
    first = begin(None, [event("a"), event("b")], 5)
    both = begin(first, [event("c")], 5)
    assert (both.text, both.tokens, len(both.events)) == ("abc", 3, 3)
