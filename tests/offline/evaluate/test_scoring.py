"""Laws of scoring: an answer counts however it is written, and only where it says what the gold one says."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offline.evaluate.datasets.scoring import (
    chosen_label,
    last_number,
    micro_f1,
    same_number,
    same_words,
    token_f1,
    words,
)
from tests.kv.builders import laws

texts = st.lists(st.sampled_from(["the", "a", "Ada", "byron", "1815.", "was", "!"]), max_size=6).map(" ".join)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 18", "18"), ("18.00 dollars", "18"), ("$1,234,567.", "1234567"), ("-3", "-3"), ("5-4", "4"),
        ("3 then 4.5.", "4.5"), ("Answer: 7, as 3 + 4 = 7", "7"), ("x = -12.5", "-12.5"), ("none", None), ("", None),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


def test_a_number_counts_however_it_is_written():
    assert same_number("Answer: $1,000.00", ("1000",)) == 1.0
    assert same_number("1000 and 1", ("1000",)) == 0.0
    assert same_number("no number", ("1000",)) == 0.0


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("B", "B"), ("(B)", "B"), ("B.", "B"), ("B) because A is wrong", "B"), ("**C**", "C"), ("D\n", "D"),
        ("Answer: C", "C"), ("A is wrong. The answer is (D).", "D"), ("Answer: A. No.\nAnswer: B", "B"),
        ("answer: **2**", "2"), ("A robe takes two", None), ("Bad", None), ("", None), ("I do not know", None),
        ("Answer: Cat", None),
    ],
)  # fmt: skip
def test_the_label_that_an_answer_names(text, label):
    assert chosen_label(text) == label


def test_words_are_compared_without_case_articles_and_punctuation():
    assert words("The  cat, a Dog & an ant's!") == ["cat", "dog", "ants"]
    assert words("another theme") == ["another", "theme"]


@pytest.mark.parametrize(
    ("text", "gold", "f1"),
    [
        ("Ada Byron", ("ada byron",), 1.0),
        ("Ada Byron was", ("Ada",), 2 / 4),
        ("x x", ("x",), 2 / 3),
        ("y", ("x",), 0.0),
        ("y", ("x", "the y"), 1.0),
        ("", ("x",), 0.0),
        ("the", ("a",), 1.0),
    ],
)
def test_f1_by_hand(text, gold, f1):
    assert token_f1(text, gold) == pytest.approx(f1)


@laws
@given(one=texts, other=texts)
def test_f1_is_symmetric_bounded_and_free_of_order(one, other):
    assert token_f1(one, (other,)) == token_f1(other, (one,))
    assert 0 <= token_f1(one, (other,)) <= 1
    assert token_f1(one, (one,)) == 1.0
    assert token_f1(" ".join(reversed(one.split())), (other,)) == token_f1(one, (other,))


def test_micro_f1_pools_words_over_all_answers():
    """Two of two words right, none of one against two: 2 * 2 / (2 + 2 + 1 + 2)."""
    assert micro_f1([("Ada Byron", ("ada byron",)), ("nobody", ("Ada Byron",))]) == pytest.approx(4 / 7)


@laws
@given(texts, texts)
def test_micro_f1_of_one_answer_is_its_token_f1(text, gold):
    assert micro_f1([(text, (gold,))]) == pytest.approx(token_f1(text, (gold,)))


@laws
@given(texts, texts, texts)
def test_micro_f1_takes_the_gold_answer_that_fits_best(text, gold, other):
    assert micro_f1([(text, (gold, other))]) == pytest.approx(token_f1(text, (gold, other)))


@laws
@given(texts, texts)
def test_the_same_words_are_those_with_a_full_f1(text, gold):
    if len(words(text)) == len(set(words(text))):
        assert same_words(text, (" ".join(reversed(words(gold))),)) <= token_f1(text, (gold,))
    assert same_words(text, (f"The {text}!",)) == 1.0
