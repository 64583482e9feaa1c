"""What a conversation is told by, and how long it is remembered."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.conversation import Conversation, Recall

MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": st.text(max_size=5)})
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=5)


def turn(messages, *also, **fields):
    return Conversation({"messages": messages, **fields}, *also)


def recall(size=100, seconds=10.0, clock=lambda: 0.0):
    return Recall(seconds, size, clock)


@given(first=MESSAGES, more=MESSAGES)
def test_every_later_turn_finds_what_was_noted_at_an_earlier_one(first, more):
    notes = recall()
    notes.note(turn(first), "w")
    assert notes.find(turn(first)) == notes.find(turn(first + more)) == "w"


@given(first=MESSAGES, more=MESSAGES)
def test_the_longest_prefix_counts(first, more):
    notes = recall()
    notes.note(turn(first + more), "late")
    notes.note(turn(first), "early")
    assert notes.find(turn([*first, *more, {"role": "user", "content": "go on"}])) == "late"


@given(one=MESSAGES, other=MESSAGES)
def test_another_conversation_finds_nothing(one, other):
    notes = recall()
    notes.note(turn(one), "w")
    assert (notes.find(turn(other)) == "w") == (other[: len(one)] == one)


@pytest.mark.parametrize("key", ["cache_salt", "tools", "chat_template_kwargs", "lora_path"])
def test_what_shapes_the_prompt_or_parts_the_caches_is_part_of_it(key):
    notes = recall()
    messages = [{"role": "user", "content": "hello"}]
    notes.note(turn(messages, **{key: "a"}), "w")
    assert notes.find(turn(messages, **{key: "a"})) == "w"
    assert notes.find(turn(messages, **{key: "b"})) is None is notes.find(turn(messages))


def test_what_is_folded_in_is_part_of_it():
    messages = [{"role": "user", "content": "hello"}]
    seen = {tuple(turn(messages, *also).digests) for also in [(), ("",), ("a",), ("a", ""), ("", "a"), ("a", "b")]}
    assert len(seen) == 6


LEAF = st.none() | st.booleans() | st.floats() | st.text(max_size=5)
ODD = st.recursive(LEAF, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x), max_leaves=6)


@settings(max_examples=50, deadline=None)
@given(ODD)
def test_no_body_is_too_odd(value):
    for body in ({"messages": value}, {"messages": [value]}, {"tools": value, "messages": ["\ud800"]}):
        notes = recall()
        notes.note(Conversation(body), "w")
        assert (notes.find(Conversation(body)) == "w") == bool(Conversation(body).digests)


def test_no_more_is_remembered_than_there_is_room_for_and_what_is_used_stays():
    notes = recall(size=3)
    turns = [turn([{"role": "user", "content": str(number)}]) for number in range(10)]
    for number, each in enumerate(turns):
        notes.note(each, number)
        notes.find(turns[0])
    assert len(notes) == 3
    assert [notes.find(each) for each in turns] == [0, *[None] * 7, 8, 9]


def test_a_note_lives_for_its_time():
    now = [0.0]
    notes = recall(seconds=10.0, clock=lambda: now[0])
    hello = turn([{"role": "user", "content": "hello"}])
    notes.note(hello, "w")
    now[0] = 9.0
    assert notes.find(hello) == "w"
    now[0] = 10.0
    assert notes.find(hello) is None and len(notes) == 0
