"""Laws of the corpus: records come in order, one at a time, and a bad one is named by file and line."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from sglang_ext.errors import CalibrationError
from sglang_ext.offline.corpus import encode, read_prompts
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import tokenizer

GOOD = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}, {"text": "three", "source": "book"}]


@pytest.fixture
def corpus(tmp_path):
    """Writes lines to a file; gives its name."""

    def write(*lines: str) -> str:
        path = tmp_path / "corpus.jsonl"
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    return write


def test_records_come_in_order_and_blank_lines_are_no_records(corpus):
    lines = [json.dumps(record) for record in GOOD]
    assert list(read_prompts(corpus(lines[0], "", lines[1], "   ", lines[2]))) == GOOD


def test_an_empty_file_holds_no_records(corpus):
    assert list(read_prompts(corpus(""))) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{broken", "not JSON"),
        ('{"text": "a"', "not JSON"),
        ("[1, 2]", "expected an object with `messages` or `text`"),
        ('"text"', "expected an object"),
        ('{"prompt": "a"}', "expected an object with `messages` or `text`"),
        # A record that no tokenizer can take is neither messages nor text.
        ('{"text": 5}', "text"),
        ('{"text": null}', "text"),
        ('{"messages": "hello"}', "messages"),
        ('{"messages": []}', "messages"),
        ('{"messages": ["hello"]}', "a message must be an object with `role` and `content`, found 'hello'"),
        ('{"messages": [{"role": "user"}]}', "a message must be an object"),
        ('{"messages": [{"role": 1, "content": "a"}]}', "a message must be an object"),
    ],
)
def test_a_bad_line_is_named_by_file_and_line(corpus, line, reason):
    path = corpus(json.dumps(GOOD[0]), "", line, json.dumps(GOOD[1]))
    records = read_prompts(path)
    assert next(records) == GOOD[0]
    with pytest.raises(CalibrationError, match=f"corpus.jsonl:3: .*{reason}"):
        list(records)


def test_lines_are_read_as_they_are_wanted(corpus):
    path = corpus(*[json.dumps(GOOD[0])] * 3, "{broken")
    assert list(islice(read_prompts(path), 3)) == [GOOD[0]] * 3


def test_a_missing_file_is_named_with_what_was_expected(tmp_path):
    with pytest.raises(CalibrationError, match="absent.jsonl does not exist; expected .*family:N"):
        list(read_prompts(str(tmp_path / "absent.jsonl")))


def test_the_familys_prompts_are_as_many_as_asked_and_the_same_each_time():
    once, again = (list(read_prompts("family:12")) for _ in range(2))
    assert once == again and len(once) == 12
    assert len({json.dumps(record, default=list) for record in once}) == 12
    assert list(read_prompts("family:5")) == once[:5]
    assert list(read_prompts("family:0")) == []


@pytest.mark.parametrize("data", ["family:", "family:many", "family:-1", "family:1.5"])
def test_a_family_without_a_number_is_refused(data):
    with pytest.raises(CalibrationError, match="whole number"):
        list(read_prompts(data))


def test_messages_are_encoded_as_a_worker_renders_them():
    record = next(iter(read_prompts("family:1")))
    expected = tokenizer().apply_chat_template(record["messages"], add_generation_prompt=True, return_dict=False)
    assert encode(tokenizer(), record) == expected
    assert tokenizer().decode(expected).endswith("assistant\n")


def test_text_is_encoded_as_it_is():
    assert encode(tokenizer(), {"text": "one two"}) == tokenizer().encode("one two")


def test_messages_that_the_template_refuses_are_shown():
    picky = tokenizer.__wrapped__()
    picky.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(CalibrationError, match="template refuses .*'two'.*: roles must alternate"):
        encode(picky, GOOD[1])


def test_the_familys_documents_are_sentences_by_themselves_of_the_calibration_split():
    documents = [record["text"] for record in read_prompts("family-documents:24")]
    prompts = [record["messages"][-1]["content"] for record in read_prompts("family:24")]
    assert all(document in prompt for document, prompt in zip(documents, prompts, strict=True))
    assert sorted({document.count(".") for document in documents}) == [1, 2, 3, 6]
