"""Laws of the datasets: each kind of file gives the same kind of item; what is broken is named by file and line."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.link import locate
from sglang_ext.documents.tasks import LAYOUTS
from sglang_ext.errors import KVLiftError
from sglang_ext.offline.corpus import encode
from sglang_ext.offline.evaluate.datasets import load
from sglang_ext.offline.evaluate.errors import EvaluationError
from tests.kv.models import executor, tokenizer
from tests.worker.smollm2 import smollm2

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
with_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared data beside the checkout")

HUB_ARC = {
    "id": "Q1", "question": "What melts ice?", "answerKey": "C",
    "choices": {"text": ["cold", "dark", "heat", "wind"], "label": ["A", "B", "C", "D"]},
}  # fmt: skip
HOTPOT = {
    "_id": "h",
    "question": "Who?",
    "answer": "Ada",
    "context": [["One", ["Ada was.", " She is."]], ["Two", ["No."]]],
}
MUSIQUE = {
    "id": "m", "question": "Who?", "answer": "Ada Byron", "answer_aliases": ["Ada"],
    "paragraphs": [{"title": "One", "paragraph_text": "Ada was. She is."}, {"title": "Two", "paragraph_text": "No."}],
}  # fmt: skip
LONGBENCH = {"_id": "l", "input": "Who?", "answers": ["Ada"], "context": "One\nAda was. She is.", "dataset": "qasper_e"}
CSV = "question,choices,answer,error_type,correct_answer\n"


@pytest.fixture
def file(tmp_path):
    """Writes a file; gives its path."""

    def write(name: str, text: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def lines(*records: dict) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def prompt(item) -> str:
    return item.messages[-1]["content"]


def test_the_family_deals_its_tasks_in_turn():
    dev, test = load("family-dev:2"), load("family:2")
    assert [item.task for item in dev.items] == ["biography", "arithmetic"] * 2
    assert not {prompt(item) for item in dev.items} & {prompt(item) for item in test.items}
    for item in dev.items:
        assert item.score(f"Answer: {item.gold[0]}.") == 1.0
        assert item.score("Answer: nothing.") == 0.0


def test_gsm8k_asks_for_steps_and_scores_the_last_number(file):
    path = file(
        "g.jsonl", lines({"question": "Six and 1,000?", "answer": "6 + 1000 = <<6+1000=1006>>1006\n#### 1,006"})
    )
    [item] = load(f"gsm8k:{path}").items
    assert prompt(item).startswith("Six and 1,000?")
    assert (item.kind, item.max_new_tokens) == ("accuracy", 1024)
    assert item.score("First 6. Answer: $1,006.00") == 1.0
    assert item.score("1006 or rather 7") == 0.0


@pytest.mark.parametrize(
    "record",
    [
        HUB_ARC,
        {"id": "Q1", "answerKey": "C", "question": {"stem": "What melts ice?", "choices": [
            {"label": a, "text": t} for a, t in zip("ABCD", HUB_ARC["choices"]["text"])]}},
        {"questionID": "Q1", "AnswerKey": "C", "question": "What melts ice? (A) cold (B) dark (C) heat (D) wind"},
        {**HUB_ARC, "choices": "{'text': array(['cold', 'dark', 'heat', 'wind'], dtype=object), "
                               "'label': array(['A', 'B', 'C', 'D'], dtype=object)}"},
    ],
)  # fmt: skip
def test_arc_is_one_item_in_all_its_forms(file, record):
    [expected] = load(f"arc:{file('arc.jsonl', lines(HUB_ARC))}").items
    [item] = load(f"arc:{file('arc.jsonl', lines(record))}").items
    assert (item.id, item.record, item.gold) == (expected.id, expected.record, ("C",))
    assert "C. heat" in prompt(item) and "step by step" in prompt(item)
    assert item.score("Ice melts when warm.\nAnswer: C") == 1.0
    assert item.score("Answer: A") == 0.0


def test_arc_of_csv_has_numbers_for_labels_too(file):
    path = file("arc.csv", "questionID,AnswerKey,question\nx,2,What? (1) this (2) that\n")
    [item] = load(f"arc:{path}").items
    assert item.gold == ("2",) and "2. that" in prompt(item)


@pytest.mark.parametrize("mark", [",", ";"])
def test_mmlu_redux_keeps_what_is_right_or_was_put_right(file, mark):
    rows = [
        ("Plain?", "1", "OK", ""),
        ("Mended?", "0", "wrong_groundtruth", "2"),
        ("Mended by letter?", "0", "Wrong Groundtruth", "D"),
        ("Wrong for good?", "0", "wrong groundtruth", "none of them"),
        ("Unclear?", "0", "bad_question_clarity", "1"),
        ("Two?", "0", "multiple correct answers", "1"),
    ]
    text = CSV.replace(",", mark) + "".join(
        mark.join((question, "\"['w', 'x', 'y', 'z']\"", answer, error, fixed)) + "\n"
        for question, answer, error, fixed in rows
    )
    found = load(f"mmlu-redux:{file('mmlu_law.csv', text).parent}")
    assert [item.gold for item in found.items] == [("B",), ("C",), ("D",)]
    assert [item.id for item in found.items] == ["law/1", "law/2", "law/3"]
    assert sum(found.dropped.values()) == 3
    assert found.dropped["mmlu-redux: wrong groundtruth"] == 1
    assert found.items[0].score("B") == found.items[0].score("(B).") == 1.0
    assert found.items[0].score("A") == 0.0


@pytest.mark.parametrize(
    "record",
    [HOTPOT, MUSIQUE, LONGBENCH, {**HOTPOT, "context": {"title": ["One"], "sentences": [["Ada was.", "She is."]]}},
     {**HOTPOT, "context": json.dumps(HOTPOT["context"])}],
)  # fmt: skip
@pytest.mark.parametrize("array", [False, True])
def test_multihop_shows_passages_and_scores_f1(file, record, array):
    name, text = ("q.json", json.dumps([record], indent=1)) if array else ("q.jsonl", lines(record))
    [item] = load(f"multihop:{file(name, text)}").items
    assert "One\nAda was. She is." in prompt(item) and "Question: Who?" in prompt(item)
    assert item.kind == "f1"
    assert item.score("the Ada!") == 1.0
    assert 0 < item.score("Ada and more") < 1
    assert item.max_new_tokens == (128 if record is LONGBENCH else 32)


def test_a_corpus_has_prompts_without_answers(file):
    [item] = load(f"corpus:{file('c.jsonl', lines({'text': 'words'}))}").items
    assert item.record == {"text": "words"}
    with pytest.raises(EvaluationError, match="no answers"):
        item.score("words")
    [passage] = load(f"corpus:{file('p.json', json.dumps([{'title': 'T', 'text': 'words'}]))}").items
    assert passage.record == {"text": "T\nwords"}


@pytest.mark.parametrize(
    ("kind", "name", "text", "where", "reason"),
    [
        ("gsm8k", "a.jsonl", lines({"question": "q", "answer": "#### 1"}) + "\n{broken\n", "a.jsonl:3", "not JSON"),
        ("gsm8k", "a.jsonl", b'{"question": "\xff"}\n', "a.jsonl:1", "not JSON"),
        ("gsm8k", "a.jsonl", "[1]\n", "a.jsonl", "expected an object"),
        ("gsm8k", "a.jsonl", '"x"\n', "a.jsonl:1", "expected an object"),
        ("gsm8k", "a.jsonl", lines({"question": "q"}), "a.jsonl:1", "`answer` is missing"),
        ("gsm8k", "a.jsonl", lines({"question": "", "answer": "#### 1"}), "a.jsonl:1", "`question`"),
        ("gsm8k", "a.jsonl", lines({"question": "q", "answer": "1"}), "a.jsonl:1", "#### N"),
        ("gsm8k", "a.jsonl", lines({"question": "q", "answer": "#### x"}), "a.jsonl:1", "#### N"),
        ("gsm8k", "a.txt", "x", "a.txt", "expected a .jsonl"),
        ("mmlu-redux", "m.csv", CSV + "q,\"['a', 'b']\",0,ok\n", "m.csv:2", "fields"),
        ("mmlu-redux", "m.csv", CSV + "q,\"['a', 'b']\",2,ok,\n", "m.csv:2", "expected 0 to 1"),
        ("mmlu-redux", "m.csv", CSV + "q,\"['a', \",0,ok,\n", "m.csv:2", "choices"),
        ("mmlu-redux", "m.csv", CSV + "q,\"['a']\",0,ok,\n", "m.csv:2", "choices"),
        ("mmlu-redux", "m.csv", CSV + 'q,"broken,0,ok,\n', "m.csv:", "not CSV"),
        ("arc", "a.jsonl", lines({**HUB_ARC, "answerKey": "E"}), "a.jsonl:1", "none of the labels"),
        ("arc", "a.jsonl", lines({**HUB_ARC, "choices": {"text": ["a"]}}), "a.jsonl:1", "choices"),
        ("arc", "a.jsonl", lines({**HUB_ARC, "choices": ["a", "b"]}), "a.jsonl:1", "`label` is missing"),
        ("arc", "a.csv", "id,question,answerKey\n1,What?,A\n", "a.csv:2", "at least two choices"),
        ("multihop", "q.json", json.dumps([HOTPOT, {"question": "x"}]), "q.json: record 2", "`context` is missing"),
        ("multihop", "q.jsonl", lines({**HOTPOT, "context": [["a"]]}), "q.jsonl:1", "pairs"),
        ("multihop", "q.jsonl", lines({**HOTPOT, "answer": []}), "q.jsonl:1", "one or more answers"),
        ("multihop", "q.jsonl", lines({**MUSIQUE, "paragraphs": [{"title": "a"}]}), "q.jsonl:1", "passage"),
        ("multihop", "q.jsonl", lines({**MUSIQUE, "paragraphs": ["a"]}), "q.jsonl:1", "passage"),
        ("corpus", "c.jsonl", "{broken\n", "c.jsonl:1", "not JSON"),
    ],
)  # fmt: skip
def test_what_is_broken_is_named(file, kind, name, text, where, reason):
    with pytest.raises(KVLiftError, match=reason) as raised:
        load(f"{kind}:{file(name, text)}")
    assert where in str(raised.value)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv"])
def test_an_empty_dataset_is_an_error(file, name):
    with pytest.raises(EvaluationError, match="holds no items"):
        load(f"gsm8k:{file(name, '[]' if name == 'x.json' else '')}")


def test_a_dataset_of_dropped_rows_only_says_why(file):
    path = file("m.csv", CSV + "q,\"['a', 'b']\",0,expert,\n")
    with pytest.raises(EvaluationError, match="1 dropped .*expert"):
        load(f"mmlu-redux:{path}")


@pytest.mark.parametrize("name", ["family", "family:x", "family:", "gsm8k", "gsm8k:", "squad:x", ""])
def test_an_unknown_dataset_names_those_that_there_are(name):
    with pytest.raises(EvaluationError, match="family:N.*gsm8k:PATH"):
        load(name)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(EvaluationError, match="none.jsonl cannot be read"):
        load(f"gsm8k:{tmp_path / 'none.jsonl'}")
    with pytest.raises(EvaluationError, match="holds no .csv files"):
        load(f"mmlu-redux:{tmp_path}")


def test_two_items_of_one_id_are_refused(file):
    with pytest.raises(EvaluationError, match="2 items with the id 'q/h'"):
        load(f"multihop:{file('q.jsonl', lines(HOTPOT, HOTPOT))}")


def test_a_limit_is_per_task(file):
    records = [{**LONGBENCH, "_id": str(n), "dataset": f"d{n % 2}"} for n in range(6)]
    found = load(f"multihop:{file('l.jsonl', lines(*records))}", limit=2)
    assert [item.id for item in found.items] == ["d0/0", "d1/1", "d0/2", "d1/3"]


@with_shared
def test_all_of_shared_gsm8k_loads():
    found = load(f"gsm8k:{SHARED / 'gsm8k' / 'test.jsonl'}")
    assert (len(found.items), found.dropped) == (1319, {})
    assert all(item.score(f"so it is {item.gold[0]}.") == 1.0 for item in found.items)


@with_shared
def test_all_of_shared_mmlu_redux_is_kept_or_counted():
    found = load(f"mmlu-redux:{SHARED / 'mmlu_redux'}")
    mended = found.dropped.pop("undecodable bytes replaced")
    assert mended == 1
    assert len(found.items) + sum(found.dropped.values()) == 5700
    assert len(Counter(item.task for item in found.items)) == 57
    assert all(item.score(item.gold[0]) == 1.0 for item in found.items)


@with_shared
@pytest.mark.parametrize(("name", "count"), [("hotpotqa_train", 100), ("musique_train", 100), ("sample", 1)])
def test_all_of_shared_multihop_loads(name, count):
    found = load(f"multihop:{SHARED / 'hipporag_multihop' / f'{name}.json'}")
    assert len(found.items) == count
    assert all(item.score(item.gold[0]) == 1.0 for item in found.items)
    assert all(len(prompt(item)) > 500 for item in found.items)


GENERATED = ("documents:3", "biographies:3", "biographies-dev:3", "sums:3", "needles:3")


def missed(item, reader) -> tuple[int, ...]:
    documents = [tokenizer().encode(text, add_special_tokens=False) for text in item.documents]
    return locate(encode(tokenizer(), item.record), Compiler(reader).compile(documents)).missed


@pytest.mark.parametrize("name", GENERATED)
def test_generated_documents_are_slices_of_their_prompts_and_no_two_prompts_are_equal(name):
    reader = executor("qwen3", layers=1, vocabulary=len(tokenizer()))
    found = load(name).items
    assert all(len(item.documents) > 1 and missed(item, reader) == () for item in found)
    assert len({prompt(item) for item in found}) == len(found)
    assert all(item.score(item.gold[0]) == 1.0 > item.score("Answer: nobody.") for item in found)


def test_the_tiny_task_has_every_layout_or_one():
    assert {item.task for item in load("documents:1").items} == set(LAYOUTS)
    assert {item.task for item in load("documents-6x1:2").items} == {"6x1"}


def test_a_needle_stands_once_in_its_haystack_and_nothing_else_answers_the_question():
    for item in load("needles:20").items:
        needle = item.gold[0].removeprefix("Answer:")
        assert "".join(item.documents).count(needle) == 1
        kind = needle.split()[1]
        assert "".join(item.documents).count(f" {kind} ") == 1


@pytest.mark.parametrize("record", [HOTPOT, MUSIQUE, LONGBENCH])
def test_passages_are_documents_and_slices_of_the_prompt(file, record):
    [item] = load(f"multihop:{file('q.jsonl', lines(record))}").items
    text = prompt(item)
    start = text.index(item.documents[0])
    assert text[start:].startswith("".join(item.documents) + "Question: Who?")
    assert all(document.endswith("\n") for document in item.documents)


@pytest.mark.parametrize("record", [HOTPOT, MUSIQUE])
def test_passages_are_slices_of_the_prompts_tokens_too(file, record):
    """With a real model's tokenizer, which joins two newlines to one token at the end of a text alone."""
    real = AutoTokenizer.from_pretrained(smollm2())
    [item] = load(f"multihop:{file('q.jsonl', lines(record))}").items
    ids = encode(real, item.record)
    for document in item.documents:
        own = real.encode(document, add_special_tokens=False)
        assert any(ids[at : at + len(own)] == own for at in range(len(ids)))
