"""Laws of the tests of significance: values worked out by hand, symmetry, and no p of an order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offline.evaluate.significance import mcnemar, paired_p, sign_flip
from tests.kv.builders import laws

counts = st.integers(0, 40)
scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=8)


@pytest.mark.parametrize(
    ("only_one", "only_other", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (5, 0, 2 / 32),
        (1, 9, 2 * 11 / 1024),  # (1 + 10) of 1,024 ways
        (2, 8, 2 * 56 / 1024),
        (5, 5, 1.0),
        (0, 10, 2 / 1024),
    ],
)
def test_mcnemar_by_hand(only_one, only_other, p):
    assert mcnemar(only_one, only_other) == pytest.approx(p)


@laws
@given(one=counts, other=counts)
def test_mcnemar_is_symmetric_and_a_probability(one, other):
    assert mcnemar(one, other) == mcnemar(other, one)
    assert 0 < mcnemar(one, other) <= 1


@laws
@given(one=counts)
def test_more_discordance_to_one_side_is_less_likely(one):
    assert mcnemar(0, one + 1) <= mcnemar(0, one)


def test_sign_flip_by_hand():
    assert sign_flip([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]) == pytest.approx(2 / 8)
    # |0.5 + 0.25| is reached by ++ and -- alone.
    assert sign_flip([0.5, 0.25], [0.0, 0.0]) == pytest.approx(2 / 4)
    assert sign_flip([0.3, 0.0], [0.0, 0.3]) == 1.0
    assert sign_flip([0.4, 0.9], [0.4, 0.9]) == 1.0


@laws
@given(pairs=scores)
def test_sign_flip_is_symmetric_and_free_of_order(pairs):
    one, other = [a for a, _ in pairs], [b for _, b in pairs]
    assert sign_flip(one, other) == pytest.approx(sign_flip(other, one))
    assert sign_flip(one, other) == pytest.approx(sign_flip(one[::-1], other[::-1]))


def test_drawn_signs_agree_with_mcnemar_where_both_apply():
    one, other = [1.0] * 20 + [0.0] * 8, [0.0] * 20 + [1.0] * 8
    assert sign_flip(one, other) == pytest.approx(mcnemar(20, 8), abs=0.01)
    assert sign_flip(one, other) == sign_flip(one[::-1], other[::-1])
    assert sign_flip([1.0] * 30, [0.0] * 30) > 0


def test_right_and_wrong_go_to_mcnemar_and_shares_to_the_sign_flip():
    right, wrong = [1.0] * 14, [0.0] * 14
    assert paired_p(right, wrong) == mcnemar(14, 0)
    assert paired_p([0.5, *right], [0.0, *wrong]) != mcnemar(15, 0)


def test_arms_of_different_items_are_no_pairs():
    with pytest.raises(ValueError, match="shorter"):
        paired_p([1.0, 0.0], [1.0])
