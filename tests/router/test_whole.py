"""What a policy is told of a request and of an answer, whatever shape they come in."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import RequestFacts, Token, ToolCall
from router.chat import ChatRequest
from router.events import AnswerEvent
from router.whole import Whole
from tests.policies.run import laws

TOOL = {"type": "function", "function": {"name": "find"}}


def event(choice):
    return AnswerEvent(json.dumps({"choices": [{"index": 0, **choice}]}))


def finish(*events):
    whole = Whole()
    for one in events:
        whole.add(one)
    return whole.finish("stop")


def pieces(text, cuts):
    """The text in pieces; some may be empty."""
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in pairwise(places)]


calls = st.lists(st.tuples(st.text(min_size=1), st.text()), max_size=3)


@laws
@given(st.text(), calls, st.lists(st.integers(0, 20), max_size=5))
def test_buffered_equals_streamed_however_it_is_cut(text, calls, cuts):
    told = [{"id": "x", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    streamed = [event({"delta": {"role": "assistant", "reasoning_content": "hm"}})]
    streamed += [event({"delta": {"content": piece}}) for piece in pieces(text, cuts)]
    for index, (name, arguments) in enumerate(calls):
        head = {"index": index, "id": "x", "function": {"name": name, "arguments": ""}}
        tail = [{"index": index, "function": {"arguments": piece}} for piece in pieces(arguments, cuts)]
        streamed += [event({"delta": {"tool_calls": [piece]}}) for piece in (head, *tail)]
    buffered = event({"message": {"role": "assistant", "content": text, "tool_calls": told, "reasoning_content": "hm"}})
    assert finish(*streamed) == finish(buffered)
    assert finish(buffered) == ("stop", text, tuple(ToolCall(*call) for call in calls))


def test_pieces_of_two_calls_may_come_by_turns():
    turns = [(0, "f", "{"), (1, "g", "["), (0, None, "}"), (1, None, "]")]
    deltas = [{"tool_calls": [{"index": i, "function": {"name": n, "arguments": a}}]} for i, n, a in turns]
    assert finish(*(event({"delta": d}) for d in deltas)).tool_calls == (ToolCall("f", "{}"), ToolCall("g", "[]"))


def test_two_calls_of_one_tool_in_a_message_stay_apart():
    told = [{"index": 0, "function": {"name": "f", "arguments": a}} for a in ("1", "2")]
    assert finish(event({"message": {"tool_calls": told}})).tool_calls == (ToolCall("f", "1"), ToolCall("f", "2"))


@pytest.mark.parametrize("odd", [None, "x", [None], [{}], [{"function": "f"}]])
def test_what_is_no_tool_call_is_none(odd):
    assert finish(event({"delta": {"content": "a", "tool_calls": odd}})) == ("stop", "a", ())


def test_a_token_has_its_text_and_the_likeliest_ones():
    top = [{"token": "a", "logprob": -0.1}, {"token": "b", "logprob": -2}, {"token": "c", "logprob": None}]
    told = event({"delta": {"content": "a"}, "logprobs": {"content": [{**top[0], "top_logprobs": top}]}})
    assert told.tokens() == [Token(-0.1, (-0.1, -2.0), "a")]
    assert told.first_alternatives() == [("a", -0.1), ("b", -2.0)]
    bare = event({"delta": {"content": "a"}})
    assert bare.tokens() == [Token(None)] and bare.first_alternatives() == []


def facts(**body):
    return ChatRequest.parse(json.dumps({"model": "kvlift", **body}).encode()).facts()


def test_facts_are_what_the_body_says():
    messages = [
        {"role": "system", "content": "brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url"}, {"text": "two"}]},
        {"role": "tool", "content": "found"},
    ]
    asked = {"max_tokens": 9, "max_completion_tokens": 7, "response_format": {"type": "json_object"}}
    assert facts(messages=messages, tools=[TOOL], **asked) == RequestFacts(
        characters=5 + 5 + 7 + 5,
        messages=5,
        has_tools=True,
        wants_json=True,
        text="one\ntwo",
        tool_names=("find",),
        answer_limit=7,
    )


def test_what_is_not_there_is_not_made_up():
    assert facts(messages=[{"role": "system", "content": "x"}]) == RequestFacts(
        characters=1, messages=1, has_tools=False, wants_json=False, tool_names=()
    )


@pytest.mark.parametrize("odd", [{"a": 1}, [1], [{}], [TOOL, {"function": {"name": 7}}], ["find"]])
def test_tools_that_cannot_be_read_are_not_known(odd):
    assert facts(messages=[], tools=odd).tool_names is None


@pytest.mark.parametrize("odd", ["x", 7, {"role": "user"}, [None, "x", 1]])
def test_messages_that_are_none_are_passed_over(odd):
    assert facts(messages=odd)[:2] == (0, 0)
