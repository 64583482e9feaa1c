"""Rules on the complete answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Decision, Finish, ToolCall
from policies.answer_rules import AnswerRegex, Empty, InvalidJson, InvalidToolCall, Refusal
from tests.policies.run import STOP, decide, facts, laws, reason

JSON = facts(wants_json=True)
TOOLS = facts(has_tools=True, tool_names=("add", "mul"))


def said(text: str, *calls: ToolCall) -> Finish:
    return Finish("tool_calls" if calls else "stop", text=text, tool_calls=calls)


HIT = {
    AnswerRegex(pattern="un[su]ure"): ("answer_pattern", {"finish": said("I am unsure.")}),
    Refusal(): ("refusal", {"finish": said("I\u2019m sorry, but no.")}),
    Empty(): ("empty_answer", {"finish": said(" \n")}),
    InvalidJson(): ("invalid_json", {"finish": said("{a: 1}"), "facts": JSON}),
    InvalidToolCall(): ("unknown_tool", {"finish": said("", ToolCall("rm", "{}")), "facts": TOOLS}),
}


@pytest.mark.parametrize("rule", HIT, ids=lambda rule: rule.method)
def test_a_match_escalates_and_may_name_a_tier(rule):
    word, told = HIT[rule]
    assert decide(rule, **told)[0] == Decision.escalate(word)
    assert decide(rule.model_copy(update={"to": "huge"}), **told)[0] == Decision.escalate(word, "huge")


@pytest.mark.parametrize("rule", HIT, ids=lambda rule: rule.method)
def test_a_plain_answer_passes(rule):
    assert decide(rule, finish=said("Paris."))[0] == Decision.keep("no_match")


@pytest.mark.parametrize("rule", HIT, ids=lambda rule: rule.method)
def test_what_was_not_measured_is_not_read_as_good(rule):
    assert decide(rule, finish=STOP, facts=JSON)[0] == Decision.escalate("no_signal")


def test_hedged_english_is_found_by_default():
    assert reason(AnswerRegex(), finish=said("Well, I'm not sure.")) == "answer_pattern"
    assert reason(AnswerRegex(), finish=said("I don\u2019t know.")) == "answer_pattern"
    assert reason(AnswerRegex(), finish=said("I am sure.")) == "no_match"


def test_a_refusal_counts_at_the_beginning_only():
    late = "Here it is. " * 20 + "Beyond that I cannot help."
    assert reason(Refusal(), finish=said(late)) == "no_match"
    assert reason(Refusal(within=1000), finish=said(late)) == "refusal"
    assert reason(Refusal(phrases=("Das geht nicht",)), finish=said("DAS  geht nicht!")) == "refusal"


def test_a_tool_call_is_no_empty_answer():
    assert reason(Empty(), finish=said("", ToolCall("add", "{}"))) == "no_match"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@laws
@given(json_values)
def test_json_passes_and_its_every_cut_of_an_object_does_not(value):
    text = json.dumps({"answer": value})
    assert reason(InvalidJson(), finish=said(text), facts=JSON) == "no_match"
    for end in range(0, len(text), 7):
        assert reason(InvalidJson(), finish=said(text[:end]), facts=JSON) == "invalid_json"
        assert reason(InvalidJson(), finish=said(text[:end])) == "no_match"  # nobody asked for JSON


@pytest.mark.parametrize("text", ['{"a": NaN}', "```json\n{}\n```", "[" * 100_000])
def test_json_is_strict(text):
    assert reason(InvalidJson(), finish=said(text), facts=JSON) == "invalid_json"


@pytest.mark.parametrize(
    ("calls", "word"),
    [
        ([("add", '{"a": 1}')], "no_match"),
        ([("add", '{"a": 1')], "invalid_arguments"),
        ([("add", "[1]")], "invalid_arguments"),
        ([("add", "")], "invalid_arguments"),
        ([("add", "{}"), ("sub", "{}")], "unknown_tool"),
        ([("add", "{}"), ("mul", "{")], "invalid_arguments"),
        ([], "no_match"),
    ],
)
def test_each_tool_call_is_offered_and_its_arguments_parse(calls, word):
    finish = said("", *(ToolCall(*call) for call in calls))
    assert reason(InvalidToolCall(), finish=finish, facts=TOOLS) == word


def test_the_tools_that_were_offered_must_be_told():
    assert reason(InvalidToolCall(), finish=said("", ToolCall("add", "{}"))) == "no_signal"


def test_an_answer_of_tool_calls_is_not_read_as_json():
    assert reason(InvalidJson(), finish=said("", ToolCall("add", "{}")), facts=JSON) == "no_match"
