"""Laws of the event stream parser."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from router.sse import SSEParser, encode

streams = st.lists(
    st.sampled_from(
        [
            "data: ",
            "data:",
            "data",
            ": comment",
            "event: x",
            "id",
            "\n",
            "\r\n",
            "\r",
            "é",
            "漢",
            "𝄞",
            "\ufeff",
            "a",
            " ",
        ]
    ),
    max_size=40,
).map("".join)


def parse(*chunks: bytes) -> list[str]:
    parser = SSEParser()
    return [data for chunk in chunks for data in parser.feed(chunk)]


@given(streams)
def test_byte_by_byte_equals_whole(text):
    raw = text.encode()
    assert parse(*(raw[i : i + 1] for i in range(len(raw)))) == parse(raw)


@given(streams, st.lists(st.integers(0, 200), max_size=6))
def test_cutting_anywhere_changes_nothing(text, cuts):
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    assert parse(*(raw[a:b] for a, b in pairwise(edges))) == parse(raw)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_no_bytes_break_it(one, other):
    parse(one, other)


@given(st.text(st.characters(exclude_characters="\r", exclude_categories=["Cs"])))
def test_what_is_encoded_is_parsed(data):
    assert parse(encode(data)) == [data]


@given(streams)
def test_line_ends_are_interchangeable(text):
    plain = text.replace("\r\n", "\n").replace("\r", "\n")
    assert (
        parse(plain.replace("\n", "\r\n").encode())
        == parse(plain.encode())
        == parse(plain.replace("\n", "\r").encode())
    )


def test_multi_line_data_comments_and_other_fields():
    assert parse(b": ping\n\nevent: x\ndata: one\ndata:two\nid: 3\n\n") == ["one\ntwo"]


def test_an_event_that_has_not_ended_is_not_an_event():
    assert parse(b"data: whole\n\ndata: half\n") == ["whole"]
