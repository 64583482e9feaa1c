"""Events of both endpoints: what is read, what is changed, and that no worker can send one that breaks the router."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import Token
from router.events import AnswerEvent, Malformed

scalars = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
entries = st.fixed_dictionaries({}, optional={"token": values, "logprob": values, "top_logprobs": values})
logprobs = st.fixed_dictionaries(
    {},
    optional={
        "content": st.lists(entries | values, max_size=3) | values,
        "tokens": st.lists(values, max_size=3) | values,
        "token_logprobs": st.lists(values, max_size=3) | values,
        "top_logprobs": st.lists(st.dictionaries(st.text(max_size=2), values, max_size=2) | values, max_size=3)
        | values,
    },
)
said = st.fixed_dictionaries({}, optional={"role": values, "content": values, "tool_calls": values, "other": values})
choices = st.fixed_dictionaries(
    {},
    optional={
        "index": values,
        "delta": said | values,
        "message": said | values,
        "text": values,
        "finish_reason": values,
        "logprobs": logprobs | values,
    },
)
bodies = st.fixed_dictionaries({}, optional={"choices": values, "usage": values, "error": values}) | values
chosen = choices | st.fixed_dictionaries({"logprobs": logprobs}) | st.fixed_dictionaries({"delta": said})


@settings(max_examples=400, deadline=None)
@given(
    bodies | st.fixed_dictionaries({"choices": st.lists(chosen, min_size=1, max_size=2)}), st.sampled_from([None, 0, 1])
)
def test_an_event_is_malformed_or_can_be_read(body, top):
    """Whatever a worker sends: what it is not, it is not half."""
    try:
        event = AnswerEvent(json.dumps(body))
    except Malformed:
        return
    assert event.data == json.dumps(body)
    reads = (event.error, event.usage, event.is_usage_only, event.has_content(), event.has_other_than_text())
    more = (event.finishes(), event.indices(), event.tokens(), event.text(), event.tool_calls())
    assert len(reads + more) == 10 and event.first_alternatives() is not None
    event.drop_role()
    event.show_logprobs(top)
    assert json.loads(event.data) == event.body


def completion(**logprobs):
    return AnswerEvent(json.dumps({"choices": [{"index": 0, "text": "ab", "logprobs": logprobs}]}))


def test_the_tokens_of_a_completion_are_read_as_those_of_a_chat():
    told = completion(tokens=["a", "b"], token_logprobs=[-0.5, -1], top_logprobs=[{"a": -0.5, "x": -2}, None])
    assert told.tokens() == [Token(-0.5, (-0.5, -2.0), "a"), Token(-1.0, (), "b")]
    assert told.first_alternatives() == [("a", -0.5), ("x", -2.0)]
    assert told.text() == "ab" and told.has_content()


@pytest.mark.parametrize(("top", "left"), [(2, 2), (1, 1), (0, 0)])
def test_alternatives_are_cut_to_what_was_asked(top, left):
    told = completion(tokens=["a"], token_logprobs=[-1], top_logprobs=[{"a": -1, "b": -2}])
    told.show_logprobs(top)
    shown = json.loads(told.data)["choices"][0]["logprobs"]
    assert shown["token_logprobs"] == [-1]
    assert [len(one) for one in shown["top_logprobs"]] == ([left] if left else [])


def test_what_nobody_changed_leaves_as_it_came():
    raw = '{"choices":[ {"index":0,"delta":{"content":"x"}, "logprobs":{"content":[{"token":"x","top_logprobs":[]}]}}]}'
    told = AnswerEvent(raw)
    told.show_logprobs(0)
    assert told.drop_role() and told.data == raw
    told.show_logprobs(None)
    assert told.data != raw


@pytest.mark.parametrize(
    ("delta", "finish", "left"),
    [
        ({"role": "assistant", "content": ""}, None, False),
        ({"role": "assistant", "content": None}, None, False),
        ({"role": "assistant", "content": "x"}, None, True),
        ({"role": "assistant"}, "stop", True),
        ({"content": "x"}, None, True),
        ({}, None, True),  # not ours to drop
    ],
)
def test_a_role_is_taken_out(delta, finish, left):
    told = AnswerEvent(json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}))
    assert told.drop_role() == left
    assert "role" not in told.data


@pytest.mark.parametrize(
    "choice",
    [
        7,
        {"text": 5},
        {"delta": []},
        {"message": "x"},
        {"index": []},
        {"logprobs": []},
        {"logprobs": {"content": 3}},
        {"logprobs": {"content": [3]}},
        {"logprobs": {"content": [{"top_logprobs": [3]}]}},
        {"logprobs": {"tokens": 3}},
        {"logprobs": {"tokens": ["a"], "top_logprobs": [3]}},
    ],
)
def test_what_is_no_choice_is_malformed(choice):
    with pytest.raises(Malformed):
        AnswerEvent(json.dumps({"choices": [choice]}))
