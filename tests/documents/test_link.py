"""Laws of linking: the prompt stays what it was, and each position has one source."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.documents.document import SOFT, Document
from sglang_ext.documents.link import link, locate
from sglang_ext.errors import BlockError, PlanError
from sglang_ext.plan import FillKind
from tests.documents.builders import document
from tests.kv.builders import laws

_IDS = st.lists(st.integers(0, 5), max_size=5)
_DOCUMENT = st.builds(
    document, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 2), st.integers(0, 2)
)
_SPANS = st.lists(_IDS | _DOCUMENT, max_size=7).filter(lambda spans: any(len(span) for span in spans))


@laws
@given(_SPANS)
def test_the_tokens_are_the_spans_one_after_the_other(spans):
    linked = link(spans)
    own = [token for span in spans for token in (span.ids if isinstance(span, Document) else span)]
    assert linked.tokens[linked.tokens != SOFT].tolist() == own


@laws
@given(_SPANS)
def test_every_document_lies_where_its_span_stands_and_nothing_else_is_filled(spans):
    linked = link(spans)
    filled = torch.zeros(len(linked), dtype=torch.bool)
    for one in linked.placed:
        assert linked.tokens[one.start : one.stop].tolist() == one.document.block.tokens.tolist()
        assert linked.tokens[one.own.start : one.own.stop].tolist() == one.document.ids
        filled[one.start : one.stop] = True
    filled[-1] = False  # the last position is always computed
    assert linked.plan.filled.tolist() == torch.nonzero(filled).flatten().tolist()
    assert int(linked.tokens[-1]) != SOFT


@laws
@given(_SPANS, st.randoms())
def test_any_order_links_the_same_documents(spans, rng):
    shuffled = rng.sample(spans, len(spans))
    one, other = link(spans), link(shuffled)
    assert sorted(map(id, _blocks(one))) == sorted(map(id, _blocks(other))) or _ends_with_document(spans, shuffled)
    assert [len(p.own) for p in other.placed] == [len(s.ids) for s in shuffled if isinstance(s, Document)]


def _blocks(linked):
    return [one.document.block for one in linked.placed]


def _ends_with_document(*orders):
    """A document at the end is linked without its trailer: another block."""
    return any(isinstance([s for s in spans if len(s)][-1], Document) for spans in orders)


@laws
@given(_SPANS)
def test_candidates_are_the_documents_own_tokens_before_the_last_position(spans):
    linked = link(spans)
    own = {at for one in linked.placed for at in one.own} - {len(linked) - 1}
    assert linked.candidates.tolist() == sorted(own)
    assert linked.computing(linked.candidates).plan.filled.tolist() == [
        at for at in linked.plan.filled.tolist() if int(linked.tokens[at]) == SOFT
    ]


def test_the_query_is_what_follows_the_last_document():
    assert link([[1, 2], document([3, 4]), [5, 6, 7]]).query == range(4, 7)
    assert link([[1, 2], document([3, 4])]).query == range(3, 4)
    assert link([[1, 2]]).query == range(2)


def test_the_same_document_may_stand_twice_and_side_by_side():
    one = document([3, 4, 5])
    linked = link([one, one, [1], one, [2]])
    assert [placed.start for placed in linked.placed] == [0, 3, 7]
    assert linked.plan.compute.tolist() == [6, 10]


def test_a_trailer_at_the_end_is_left_out_because_the_last_position_must_be_a_token():
    linked = link([[1], document([3, 4], header=1, trailer=2)])
    assert linked.tokens.tolist() == [1, SOFT, 3, 4]
    assert linked.plan.compute.tolist() == [0, 3]


def test_the_fills_say_what_they_are():
    assert {fill.kind for fill in link([document([3]), [1]]).plan.fills} == {FillKind.DOCUMENT}
    assert {fill.kind for fill in link([document([3]), [1]], FillKind.MAPPED).plan.fills} == {FillKind.MAPPED}


def test_a_header_cannot_be_computed():
    linked = link([document([3, 4], header=1), [1]])
    with pytest.raises(PlanError, match="learned"):
        linked.computing(torch.tensor([0]))


def test_documents_of_two_models_do_not_stand_in_one_prompt():
    with pytest.raises(BlockError, match="2 different models"):
        link([document([3]), document([4], name="other"), [1]])


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(PlanError):
        link([[], []])


@laws
@given(st.lists(_IDS | _DOCUMENT, max_size=6))
def test_located_spans_render_the_prompt_again(spans):
    documents = [span for span in spans if isinstance(span, Document)]
    prompt = [token for span in spans for token in (span.ids if isinstance(span, Document) else span)]
    found = locate(prompt, documents)
    assert not found.missed
    assert [t for s in found.spans for t in (s.ids if isinstance(s, Document) else s)] == prompt
    assert [span for span in found.spans if isinstance(span, Document)] == documents


def test_a_document_whose_tokens_are_no_slice_is_a_miss_and_its_tokens_stay_inline():
    first, merged, last = document([3, 4]), document([5, 6]), document([7])
    found = locate([1, 3, 4, 5, 9, 7, 2], [first, merged, last])
    assert found.missed == (1,)
    assert found.spans == ([1], first, [5, 9], last, [2])


def test_a_document_is_not_found_across_the_bytes_of_two_ids():
    """256 in two little-endian ids reads like 1, one byte further on."""
    assert locate([256, 0, 0], [document([1, 0])]).missed == (0,)


def test_documents_are_found_in_the_order_in_which_they_stand():
    first, second = document([3, 4]), document([5])
    assert locate([5, 3, 4, 5], [first, second]).spans == ([5], first, [], second, [])
    assert locate([5, 3, 4], [first, second]).missed == (1,)
