"""Rows: what they must hold, that they come back as they were written, and what many of them say."""

from __future__ import annotations

import random
from os import write

import pytest
from pydantic import ValidationError

from loadtest.errors import BadRows
from loadtest.rows import LAG_SHARE, Row, RowWriter, after_warm_up, lag_fault, quantile, read_rows


def row(index: int, ttft: float | None = 0.5, lag: float = 0.0) -> Row:
    """An arrival at second `index`; no ttft: a failure."""
    told = {"error": "boom"} if ttft is None else {"first_token_s": index + ttft}
    return Row(system="x", seed=0, index=index, scheduled_s=index, sent_s=index + lag, end_s=index + 2.0, **told)


def test_rows_come_back_as_they_were(tmp_path):
    rows = [row(0), row(1, None), Row(**{**row(2).model_dump(), "phases_ms": {"map": 1.5}, "tier": "é", "u": 0.98})]
    with RowWriter(tmp_path / "new" / "rows.jsonl") as writer:
        for one in rows:
            writer.write(one)
            assert len(list(read_rows(tmp_path / "new" / "rows.jsonl"))) == one.index + 1  # each is there at once
    assert list(read_rows(tmp_path / "new" / "rows.jsonl")) == rows


def test_processes_that_share_a_file_cut_no_line(tmp_path, monkeypatch):
    """Each row is one write at the file's end, so that rows of two writers never run into each other."""
    path, writes = tmp_path / "rows.jsonl", []
    monkeypatch.setattr("loadtest.rows.os.write", lambda file, data: writes.append(data) or write(file, data))
    with RowWriter(path) as one, RowWriter(path) as other:
        for index in range(20):
            (one if index % 3 else other).write(row(index))
    assert [Row.model_validate_json(data).index for data in writes] == list(range(20))
    assert list(read_rows(path)) == [row(index) for index in range(20)]


def test_times_run_from_the_schedule_and_a_failure_has_none():
    late = row(3, 0.5, lag=0.4)
    assert (late.ttft_s, late.total_s, late.lag_s) == pytest.approx((0.5, 2.0, 0.4))
    failed = row(3, None, lag=0.4)
    assert (failed.ttft_s, failed.total_s) == (None, None)
    assert failed.lag_s == pytest.approx(0.4)


@pytest.mark.parametrize("told", [{}, {"error": "boom", "first_token_s": 1.0}])
def test_a_row_has_a_first_token_or_an_error(told):
    with pytest.raises(ValidationError, match="either first_token_s or error"):
        Row(system="x", seed=0, index=0, scheduled_s=0, sent_s=0, end_s=1, **told)


@pytest.mark.parametrize(
    ("line", "word"), [("{}", "system"), ("not json", "row"), ("", "row"), ("EXTRA", "unknown"), ("INDEX", "index")]
)
def test_a_line_that_is_no_row_is_named(tmp_path, line, word):
    good = row(0).model_dump_json()
    line = {"EXTRA": good[:-1] + ',"unknown":1}', "INDEX": good.replace('"index":0', '"index":-1')}.get(line, line)
    (tmp_path / "rows.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(BadRows, match=rf"rows\.jsonl, line 2: {word}"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_a_file_that_cannot_be_used(tmp_path):
    with pytest.raises(BadRows, match="no-such"):
        list(read_rows(tmp_path / "no-such"))
    with pytest.raises(BadRows, match="directory"):
        RowWriter(tmp_path)


def test_warm_up_goes_by_arrival_and_keeps_failures():
    """Case L5: the rows come in order of completion."""
    rows = [row(index, None if index == 7 else 0.5) for index in range(10)]
    random.Random(0).shuffle(rows)
    kept = after_warm_up(rows, 6)
    assert sorted(one.index for one in kept) == [6, 7, 8, 9]
    assert sum(one.error is not None for one in kept) == 1


def test_quantiles_are_values_and_failures_are_later_than_all():
    values = [float(i) for i in range(1, 101)]
    random.Random(1).shuffle(values)
    assert [quantile(values, q) for q in (0.0, 0.01, 0.5, 0.99, 1.0)] == [1, 1, 50, 99, 100]
    failed: list[float | None] = [None if value > 98 else value for value in values]
    assert [quantile(failed, q) for q in (0.5, 0.98, 0.99, 1.0)] == [50, 98, None, None]
    assert quantile([], 0.5) is None and quantile([None], 0.5) is None


def test_failures_never_make_a_run_look_faster():
    values = [random.Random(2).random() for _ in range(50)]
    for q in (0.1, 0.5, 0.9, 0.99):
        for broken in range(50):
            found = quantile([None if i < broken else value for i, value in enumerate(values)], q)
            assert found is None or found >= quantile(values, q)


def test_a_lag_above_its_share_of_the_median_makes_a_run_invalid():
    """Case L2."""
    edge = LAG_SHARE * 0.5
    assert lag_fault([row(i, 0.5, lag=edge * 0.99) for i in range(100)]) is None
    reason = lag_fault([row(i, 0.5, lag=edge * 1.2) for i in range(100)])
    assert reason is not None and "30.0 ms" in reason and "500.0 ms" in reason
    # One in a hundred may be late; two may not.
    assert lag_fault([row(i, 0.5, lag=0.2 if i < 1 else 0.0) for i in range(100)]) is None
    assert lag_fault([row(i, 0.5, lag=0.2 if i < 2 else 0.0) for i in range(100)])
