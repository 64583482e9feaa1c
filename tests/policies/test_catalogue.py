"""Every method by its name: defaults, refusals, and the way through a file and back."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from policies import AnyPolicy
from policies.combine import AnyOf
from policies.shadow import Shadow

ADAPTER = TypeAdapter(AnyPolicy)
DEFAULT = [
    *("avg_logprob", "margin", "entropy", "min_window", "hybrid", "target_rate", "self_verify"),
    *("length", "keywords", "regex", "tools", "json_asked", "language"),
    *("answer_regex", "refusal", "empty", "invalid_json", "invalid_tool_call", "loop"),
    *("tier_busy", "tier_ready", "budget", "always", "never"),
]
PART = {"method": "avg_logprob", "threshold": -0.5}
AROUND = [
    {"method": "any", "of": [PART, {"method": "empty"}]},
    {"method": "all", "of": [PART]},
    {"method": "weighted", "votes": [{"policy": PART, "weight": 2}, {"policy": {"method": "any", "of": [PART]}}]},
    {"method": "shadow", "of": {"method": "all", "of": [PART]}},
]


@pytest.mark.parametrize("method", DEFAULT)
def test_every_method_has_a_documented_default(method):
    policy = ADAPTER.validate_python({"method": method})
    assert policy.method == method
    assert len(type(policy).__doc__ or "") > 40
    policy.begin()


def test_the_lists_here_are_whole():
    tags = set(ADAPTER.json_schema()["discriminator"]["mapping"])
    assert tags == set(DEFAULT) | {spec["method"] for spec in AROUND}


@pytest.mark.parametrize("spec", [*AROUND, *({"method": method} for method in DEFAULT)])
def test_a_policy_survives_the_way_through_a_file(spec):
    policy = ADAPTER.validate_python(spec)
    again = ADAPTER.validate_json(policy.model_dump_json())
    assert again.model_dump() == policy.model_dump()


@pytest.mark.parametrize("spec", [*AROUND, *({"method": method} for method in DEFAULT)])
def test_an_unknown_parameter_is_refused_by_every_method(spec):
    with pytest.raises(ValidationError, match="x_unknown"):
        ADAPTER.validate_python({**spec, "x_unknown": 1})


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"method": "guess"},
        {"method": "avg_logprob", "threshold": 0.5},
        {"method": "avg_logprob", "threshold": float("-inf")},
        {"method": "entropy", "threshold": 1.1},
        {"method": "entropy", "alternatives": 1},
        {"method": "min_window", "window": 0},
        {"method": "hybrid", "weights": {}},
        {"method": "hybrid", "weights": {"guess": 1}},
        {"method": "hybrid", "weights": {"margin": 0}},
        {"method": "target_rate", "rate": 0},
        {"method": "target_rate", "of": {"method": "never"}},
        {"method": "self_verify", "yes_words": []},
        {"method": "length", "characters": None},
        {"method": "keywords", "words": []},
        {"method": "keywords", "words": ["  "]},
        {"method": "regex", "pattern": "("},
        {"method": "answer_regex", "pattern": ""},
        {"method": "language", "known": ["klingon"]},
        {"method": "loop", "repeats": 1},
        {"method": "any", "of": []},
        {"method": "any"},
        {"method": "weighted", "votes": [{"policy": PART, "weight": 0}]},
        {"method": "weighted", "votes": [{"policy": PART}], "threshold": 0},
        {"method": "budget", "share": 2},
        {"method": "shadow"},
        {"method": "any", "of": [{"method": "shadow", "of": PART}]},
    ],
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(wrong)


def test_a_wrong_pattern_is_named_with_what_is_wrong():
    with pytest.raises(ValidationError, match=r"'\(' is not a regular expression: missing \)"):
        ADAPTER.validate_python({"method": "regex", "pattern": "("})


def test_a_fault_deep_inside_is_named_at_its_place_and_once():
    spec = {"method": "shadow", "of": {"method": "any", "of": [PART, {"method": "all", "of": [{"method": "tolos"}]}]}}
    with pytest.raises(ValidationError) as caught:
        ADAPTER.validate_python(spec)
    assert [fault["loc"] for fault in caught.value.errors()] == [("shadow", "of", "any", "of", 1, "all", "of", 0)]


@pytest.mark.parametrize("kind", [AnyOf, Shadow])
def test_a_policy_around_others_asks_for_what_they_need(kind):
    inner = {
        "method": "any",
        "of": [
            {"method": "entropy", "alternatives": 6},
            {"method": "margin"},
            {"method": "self_verify", "ask": "Sure?", "alternatives": 4},
            {"method": "tools", "to": "large"},
            {"method": "tier_ready", "tier": "middle"},
            {"method": "tier_busy", "tier": "small", "to": "huge"},
        ],
    }
    policy = kind.model_validate({"of": inner if kind is Shadow else [inner]})
    assert policy.top_logprobs == 6
    assert (policy.question, policy.question_logprobs) == ("Sure?", 4)
    assert policy.tiers == {"small", "middle", "large", "huge"}


def test_a_combination_that_needs_nothing_asks_for_nothing():
    policy = AnyOf.model_validate({"of": [{"method": "tools"}, {"method": "never"}]})
    assert (policy.top_logprobs, policy.question, policy.question_logprobs, policy.tiers) == (None, None, 0, set())


def test_two_different_questions_are_refused():
    ask = [{"method": "self_verify", "ask": text} for text in ("Sure?", "Right?")]
    with pytest.raises(ValidationError, match="ask one"):
        AnyOf.model_validate({"of": [ask[0], {"method": "all", "of": [ask[1]]}]})
    AnyOf.model_validate({"of": [ask[0], ask[0]]})
