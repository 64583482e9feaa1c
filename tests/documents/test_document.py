"""A document says which of its entries are its own tokens."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.documents.document import SOFT, Document
from sglang_ext.errors import DocumentError
from tests.documents.builders import document


def test_its_own_tokens_stand_between_header_and_trailer():
    one = document([5, 6, 7], header=2, trailer=3)
    assert one.ids == [5, 6, 7]
    assert len(one) == 8


def test_without_its_trailer_it_ends_with_its_last_token():
    one = document([5, 6, 7], header=2, trailer=3)
    cut = one.without_trailer()
    assert (len(cut), cut.ids, cut.trailer) == (5, one.ids, 0)
    assert torch.equal(cut.block.keys, one.block.keys[:, :5])


@pytest.mark.parametrize(("header", "trailer"), [(1, 0), (0, 1), (0, 0), (2, 2), (-1, 1)])
def test_soft_entries_that_do_not_fit_are_refused(header, trailer):
    block = document([5, 6], header=1, trailer=1).block
    if (header, trailer) == (1, 1):
        return
    with pytest.raises(DocumentError):
        Document(block, header, trailer)


def test_a_document_without_a_token_is_refused():
    block = document([5], header=1, trailer=1).block
    with pytest.raises(DocumentError, match="at least one"):
        Document(block, header=1, trailer=2)
    assert int((block.tokens == SOFT).sum()) == 2
