"""Laws of decoding together: a row says what it would say alone, and holds the KV of what it said."""

from __future__ import annotations

import pytest
import torch

from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import KINDS, executor, prompts

LENGTHS, LIMIT = (23, 1, 9, 40, 12), 10
CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module", params=KINDS)
def ours(request):
    return executor(request.param)


@pytest.fixture(scope="module")
def alone(ours):
    """Each prompt's row and answer, decoded without company."""
    found = []
    for ids in prompts(LENGTHS):
        [row], logits = ours.prefill([ids])
        found.append((row, ours.greedy([row], logits, LIMIT, [])[0]))
    return found


def test_rows_decode_together_as_they_do_alone(ours, alone):
    rows, logits = ours.prefill(prompts(LENGTHS))
    assert ours.greedy(rows, logits, LIMIT, []) == [answer for _, answer in alone]


def test_a_row_that_stops_leaves_the_others_as_they_were(ours, alone):
    """The stop tokens end the rows at different steps, the first of them in the middle."""
    stop = {answer[3 + n] for n, (_, answer) in enumerate(alone[:3])}
    rows, logits = ours.prefill(prompts(LENGTHS))
    expected = []
    for _, answer in alone:
        end = next((at for at, token in enumerate(answer) if token in stop), LIMIT)
        expected.append(answer[:end])
    assert len({len(answer) for answer in expected}) > 1
    assert ours.greedy(rows, logits, LIMIT, sorted(stop)) == expected


def test_rows_hold_the_kv_of_what_they_said_but_for_the_last_token(ours, alone):
    batch = prompts(LENGTHS)
    rows, logits = ours.prefill(batch)
    answers = ours.greedy(rows, logits, LIMIT, [])
    for ids, answer, row in zip(batch, answers, rows):
        whole = [*ids, *answer[:-1]]
        [native], _ = ours.prefill([whole])
        assert row.length == len(whole)
        torch.testing.assert_close(row.keys[:, : row.length], native.keys, **CLOSE)
        torch.testing.assert_close(row.values[:, : row.length], native.values, **CLOSE)


def test_what_lies_beyond_a_rows_length_is_never_read(ours, alone):
    rows, logits = ours.prefill(prompts(LENGTHS), spare=4)
    for row in rows:
        row.keys[:, row.length :] = torch.nan
        row.values[:, row.length :] = torch.nan
    assert ours.greedy(rows, logits, LIMIT, []) == [answer for _, answer in alone]


def test_a_row_can_go_on_from_where_it_was(ours, alone):
    rows, logits = ours.prefill(prompts(LENGTHS))
    first = ours.greedy(rows, logits, 4, [])
    steps = torch.stack([torch.nn.functional.one_hot(torch.tensor(answer[-1]), logits.shape[-1]) for answer in first])
    second = ours.greedy(rows, steps, LIMIT - 3, [])  # says its last token again, this time with KV
    assert [one[:-1] + other for one, other in zip(first, second)] == [answer for _, answer in alone]
