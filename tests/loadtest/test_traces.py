"""Recorded traces: what is read, and that a broken line is named."""

from __future__ import annotations

from itertools import pairwise

import pytest

from loadtest.errors import BadTrace
from loadtest.schedule import Arrival
from loadtest.traces import read_trace
from tests.loadtest.conftest import ROOT

AZURE = ROOT.parent / "shared" / "data" / "azure_llm_trace"
DATES = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 23:59:59.9999999,374,44
2023-11-17 00:00:00.0000001,396,109
2023-11-17 00:00:01,879,55
"""


@pytest.fixture
def trace(tmp_path):
    def write(text: str) -> list[Arrival]:
        (tmp_path / "trace.csv").write_bytes(text.encode())
        return read_trace(tmp_path / "trace.csv")

    return write


def test_seven_decimals_count_over_midnight(trace):
    arrivals = trace(DATES)
    assert [a.offset_s for a in arrivals] == pytest.approx([0, 2e-7, 1.0000001], abs=1e-12)
    assert [(a.index, a.context_tokens, a.output_tokens) for a in arrivals] == [
        (0, 374, 44),
        (1, 396, 109),
        (2, 879, 55),
    ]


def test_seconds_begin_where_the_first_line_is(trace):
    assert trace("100.5,7,1\n100.75,8,2\n") == [Arrival(0, 0.0, 7, 1), Arrival(1, 0.25, 8, 2)]


@pytest.mark.parametrize(
    "change", [str, lambda t: t.replace("\n", "\r\n"), lambda t: "\ufeff" + t, lambda t: t.strip()]
)
def test_heading_line_ends_mark_and_last_line_end_are_free(trace, change):
    with_heading = trace(change(DATES))
    assert with_heading == trace(change(DATES.split("\n", 1)[1]))
    assert len(with_heading) == 3


@pytest.mark.parametrize("zone", ["Z", "+02:00"])
def test_a_time_zone_changes_no_gap(trace, zone):
    assert trace(f"2023-11-16 10:00:00.5{zone},1,1\n2023-11-16T10:00:02{zone},1,1\n")[1].offset_s == 1.5


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("3,10", "2 fields"),
        ("3,10,1,9", "4 fields"),
        ("three,10,1", "seconds"),
        ("nan,10,1", "seconds"),
        ("2023-11-16 18:15:46.68,10,1", "seconds"),
        ("3,ten,1", "whole number above 0"),
        ("3,10,1.5", "whole number above 0"),
        ("3,0,1", "whole number above 0"),
        ("3,10,-1", "whole number above 0"),
        ("3,10,", "whole number above 0"),
        ("1,10,1", "times in order"),
    ],
)
def test_a_broken_line_is_named_with_what_was_expected(trace, line, expected):
    with pytest.raises(BadTrace, match=rf"trace\.csv, line 4: .*{expected}"):
        trace(f"time,context,output\n1,10,1\n2,10,1\n{line}\n4,10,1\n")


@pytest.mark.parametrize("line", ["2023-13-16 18:15:46,1,1", "2023-11-16,1,1", "7.5,1,1"])
def test_a_broken_date_is_named(trace, line):
    with pytest.raises(BadTrace, match=r"line 2: .*date and time"):
        trace(f"2023-11-16 18:15:46,1,1\n{line}\n")


@pytest.mark.parametrize("text", ["", "\n\n", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_no_arrival_is_an_error(trace, text):
    with pytest.raises(BadTrace, match="no arrival"):
        trace(text)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(BadTrace, match="no-such"):
        read_trace(tmp_path / "no-such.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadTrace, match=r"binary\.csv"):
        read_trace(tmp_path / "binary.csv")


@pytest.mark.skipif(not AZURE.is_dir(), reason="the Azure traces are not here")
@pytest.mark.parametrize("file", sorted(AZURE.glob("*.csv")), ids=lambda file: file.stem)
def test_the_azure_traces_are_read_whole(file):
    arrivals = read_trace(file)
    assert len(arrivals) == len(file.read_text().splitlines()) - 1  # the heading
    assert all(a.offset_s <= b.offset_s for a, b in pairwise(arrivals))
    assert 3000 < arrivals[-1].offset_s < 4000  # they cover about an hour
