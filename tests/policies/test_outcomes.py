"""Outcomes from CSV: the shapes that are read, and where a fault is said to be."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.outcomes import Columns, Outcome, OutcomesError, Sheet, read_outcomes
from tests.policies.run import laws

GOOD = "score,small_right,large_right\n0.5,true,false\n-1e-3,0,1\n"
ROUTELLM = """\
prompt,tiny-chat,huge-chat,tiny-chat_response,huge-chat_response
"Two
lines",True,False,"a ""quoted"" word
and, a comma",b
second,False,True,,d
"""
PLAIN = Columns()
MODELS = Columns(small="tiny-chat", large="huge-chat")


def sheet(text: str, name: str = "o.csv") -> Sheet:
    return Sheet.parse(name, io.StringIO(text, newline=""))


def read(text: str, columns: Columns = PLAIN, scores: str | None = None) -> list[Outcome]:
    return read_outcomes(sheet(text), columns, None if scores is None else sheet(scores, "s.csv"))


def fault(text: str, columns: Columns = PLAIN, scores: str | None = None) -> str:
    with pytest.raises(OutcomesError) as caught:
        read(text, columns, scores)
    return str(caught.value)


def test_a_plain_file():
    assert read(GOOD) == [Outcome(0.5, 1.0, 0.0), Outcome(-0.001, 0.0, 1.0)]


@laws
@given(
    st.lists(
        st.tuples(
            st.floats(-1e6, 1e6), st.floats(0, 1), st.booleans(), st.text(st.characters(exclude_categories=["C"]))
        ),
        min_size=1,
        max_size=20,
    )
)
def test_what_was_written_is_read(rows):
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["note", "Weak_Correct", "Large", "Confidence"])
    writer.writerows([note, small, large, score] for score, small, large, note in rows)
    assert read(text.getvalue()) == [Outcome(score, small, float(large)) for score, small, large, _ in rows]


def test_named_columns_go_before_the_aliases():
    text = "score,mine,small_right,large_right\n1,7,true,false\n"
    assert read(text, Columns(score="mine"))[0].score == 7
    assert read(text, Columns(small="large_right", large="small_right"))[0] == Outcome(1.0, 0.0, 1.0)


def test_routellms_shape_with_scores_by_prompt_or_line_by_line():
    expected = [Outcome(0.25, 1.0, 0.0), Outcome(0.75, 0.0, 1.0)]
    assert read(ROUTELLM, MODELS, 'prompt,win_rate\nsecond,0.75\n"Two\nlines",0.25\n') == expected
    assert read(ROUTELLM, MODELS, "win_rate\n0.25\n0.75\n") == expected
    columns = Columns(score="bert", small="tiny-chat", large="huge-chat")
    assert read(ROUTELLM, columns, "bert,win_rate\n0.25,9\n0.75,9\n") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "o.csv: empty"),
        ("\n\n", "o.csv: empty"),
        ("score,small_right,large_right\n\n", "o.csv: a header and no outcomes"),
        ("score,score,large_right\n1,1,1\n", "o.csv:1: the header names 'score' twice"),
        (GOOD + "1,true\n", "o.csv:4: 2 fields, expected 3"),
        (GOOD + "\n1,true,true,true\n", "o.csv:5: 4 fields, expected 3"),
        (GOOD + "high,true,true\n", "o.csv:4: score is 'high'; expected a finite number"),
        (GOOD + "nan,true,true\n", "o.csv:4: score is 'nan'"),
        (GOOD + "inf,true,true\n", "o.csv:4: score is 'inf'"),
        (GOOD + ",true,true\n", "o.csv:4: score is ''"),
        (GOOD + "1,perhaps,true\n", "o.csv:4: small_right is 'perhaps'; expected true or false"),
        (GOOD + "1,true,2\n", "o.csv:4: large_right is '2'"),
        (GOOD + "1,true,nan\n", "o.csv:4: large_right is 'nan'"),
        (GOOD + '1,"true,true\n', "o.csv:4: not CSV"),
        ("a,b\n1,1\n", "o.csv: no column for small_right"),
        ("small,large\n1,0\n", "o.csv: no column for score (score or confidence or win_rate); name it with --score"),
    ],
)
def test_a_fault_names_file_line_and_value(text, said):
    assert fault(text).startswith(said)


def test_a_record_over_several_lines_is_named_by_its_first():
    broken = ROUTELLM.replace("second,False", "second,Maybe")
    assert fault(broken, MODELS, "win_rate\n1\n2\n").startswith("o.csv:5: tiny-chat is 'Maybe'")


def test_wrong_columns_are_named():
    assert fault(GOOD, Columns(small="tiny")) == "o.csv: no column 'tiny'; columns: score, small_right, large_right"
    assert "name two columns" in fault(GOOD, Columns(small="large_right"))


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ("win_rate\n1\n", "s.csv: 1 scores for the 2 outcomes of o.csv"),
        ("prompt,win_rate\nsecond,1\n", "o.csv:2: s.csv has no score for the prompt 'Two\\nlines'"),
        ("prompt,win_rate\nsecond,1\nsecond,2\n", "s.csv:3: a second score for the prompt 'second'"),
        ("win_rate\n1\nx\n", "s.csv:3: win_rate is 'x'"),
        ("prompt\nsecond\n", "s.csv: no column for score"),
    ],
)
def test_a_fault_in_the_scores_names_their_file(scores, said):
    assert fault(ROUTELLM, MODELS, scores).startswith(said)
