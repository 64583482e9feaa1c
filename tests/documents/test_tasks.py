"""Laws of the tiny document task and of corpora: disjoint names and stories, documents that are slices of the prompt."""

from __future__ import annotations

import json
import re
from itertools import chain

import pytest

from sglang_ext.documents.corpus import read_corpus
from sglang_ext.documents.tasks import (
    CUT,
    HELD_OUT_NAMES,
    LAYOUTS,
    TRAIN_NAMES,
    TRAINED,
    UNSEEN,
    iter_items,
    make_item,
    messages,
)  # fmt: skip
from sglang_ext.errors import DocumentError
from sglang_ext.offline.family.tasks import split_of
from sglang_ext.offline.family.vocabulary import NAMES
from tests.kv.models import tokenizer

COUNT = 40
SPLITS = ("train", "dev", "test")


def facts(item) -> tuple[str, ...]:
    return tuple(re.findall(r" \w+ has \d+ \w+\.", item.text))


def test_names_of_training_and_of_measuring_are_disjoint():
    assert not set(TRAIN_NAMES) & set(HELD_OUT_NAMES) and {*TRAIN_NAMES, *HELD_OUT_NAMES} == set(NAMES)
    for split in SPLITS:
        names = set(TRAIN_NAMES if split == "train" else HELD_OUT_NAMES)
        for item in iter_items(list(LAYOUTS), split, COUNT):
            assert {fact.split()[0] for fact in facts(item)} <= names


@pytest.mark.parametrize("split", SPLITS)
def test_stories_are_of_their_split(split):
    for item in iter_items(list(LAYOUTS), split, COUNT, orders=3):
        told = facts(item)
        assert len(told) == LAYOUTS[item.layout].facts and split_of(told) == split


def test_spans_are_slices_of_the_rendered_prompt_in_text_and_tokens():
    known = tokenizer()
    for item in iter_items(list(LAYOUTS), "test", COUNT, orders=3):
        rendered = known.apply_chat_template(messages(item), tokenize=False, add_generation_prompt=True)
        assert item.text == rendered
        joined = chain.from_iterable(known.encode(span.text, add_special_tokens=False) for span in item.spans)
        assert list(joined) == known.encode(rendered, add_special_tokens=False)


def test_the_answer_follows_from_the_facts():
    for item in iter_items(list(LAYOUTS), "dev", COUNT):
        counts = {fact.split()[0]: int(fact.split()[2]) for fact in facts(item)}
        asked = re.findall(r"(\w+)(?:,| and| have)", item.question.removeprefix("How many things do"))
        assert int(item.final) == sum(2 * counts[name] for name in asked if name in counts)


def test_orders_tell_the_same_documents():
    for name in ("6x1", "3x2", "inline"):
        first, *others = (make_item(LAYOUTS[name], "test", 3, order=order) for order in range(4))
        assert len({item.text for item in others} | {first.text}) > 1
        for other in others:
            assert sorted(map(str, other.spans)) == sorted(map(str, first.spans))
            assert (other.question, other.answer) == (first.question, first.answer)
            assert (other.spans[0], other.spans[-1]) == (first.spans[0], first.spans[-1])


def test_layouts_are_what_their_names_say():
    for layout in (*TRAINED, *UNSEEN[:2]):
        documents, size = map(int, layout.name.split("x"))
        spans = make_item(layout, "test", 0).spans
        told = [span for span in spans if span.document]
        assert len(told) == documents and len(spans) == documents + 2
        assert all(
            span.text.startswith(" ") and span.text.count(".") == size and span.text.endswith(".") for span in told
        )
    inline = make_item(LAYOUTS["inline"], "test", 0).spans[1:-1]
    assert [span.document for span in inline] == [True, False, True, False, True]


def test_cut_documents_end_in_mid_sentence():
    told = [span.text for span in make_item(CUT, "test", 0, order=2).spans if span.document]
    assert [text.endswith(".") for text in told] == [False, False, True]
    assert told == [span.text for span in make_item(CUT, "test", 0).spans if span.document]


def test_an_item_is_a_function_of_its_arguments():
    assert make_item(CUT, "test", 4, seed=2) == make_item(CUT, "test", 4, seed=2)
    assert make_item(CUT, "test", 4, seed=2) != make_item(CUT, "test", 4, seed=3)


def test_unknown_layouts_are_named():
    with pytest.raises(DocumentError, match="unknown layouts 9x9; expected some of 6x1"):
        list(iter_items(["6x1", "9x9"], "test", 1))


def test_the_tiny_corpus_is_of_trained_layouts_and_names():
    corpus = read_corpus("tiny:31", tokenizer())
    assert len(corpus.records) == 31 and (corpus.split, corpus.open) == (0, 0)
    sizes = {sum(document for _, document in record.spans) for record in corpus.records}
    assert sizes == {6, 3, 2}
    held_out = {tokenizer().encode(f" {name}")[0] for name in HELD_OUT_NAMES}
    assert not any(held_out & set(record.prompt) for record in corpus.records)
    assert read_corpus("tiny:31", tokenizer()).digest == corpus.digest != read_corpus("tiny:30", tokenizer()).digest


@pytest.mark.parametrize(("layout", "documents"), [("6x1", {6}), ("inline", {3})])
def test_a_corpus_of_one_layout(layout: str, documents: set[int]):
    corpus = read_corpus(f"tiny-{layout}:7", tokenizer())
    assert len(corpus.records) == 7
    assert {sum(document for _, document in record.spans) for record in corpus.records} == documents
    with pytest.raises(DocumentError, match="unknown layouts 9x9"):
        read_corpus("tiny-9x9:7", tokenizer())


def test_records_that_no_server_would_find_are_counted(tmp_path):
    lines = [
        [("Text:", False), (" Adam has 5 apples.", True), ("\nQuestion: ?", False)],
        [("Text: Ad", False), ("am has 5 apples.", True), ("\nQuestion: ?", False)],
        [("Text:", False), (" Adam has 5 apples.", True)],
        [("Text: Adam has 5 apples.", False)],
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps({"spans": [{"text": t, "document": d} for t, d in line]}) for line in lines))
    corpus = read_corpus(str(path), tokenizer())
    assert (len(corpus.records), corpus.split, corpus.open) == (1, 1, 2)
    assert [document for _, document in corpus.records[0].spans] == [False, True, False]
    assert len(read_corpus(str(path), tokenizer(), limit=1).records) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", ":2: line: Invalid JSON"), ('{"spans": [{"txt": "a"}]}', ":2: spans.0.text: Field required")],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "records.jsonl"
    path.write_text('{"spans": [{"text": "a"}]}\n' + line + "\n")
    with pytest.raises(DocumentError, match=message):
        read_corpus(str(path), tokenizer())


def test_a_corpus_without_records_is_refused(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"spans": [{"text": "a"}]}\n')
    with pytest.raises(DocumentError, match="no record can be trained on"):
        read_corpus(str(path), tokenizer())
