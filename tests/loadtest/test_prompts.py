"""Prompts: exactly as long as asked by the target's own tokenizer and template, and no two share a beginning."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.errors import BadPrompt
from loadtest.prompts import ExactPrompts, PlainPrompts, for_arrivals
from loadtest.schedule import Arrival
from tests.loadtest.conftest import ROOT

MODEL = ROOT / "sglang_ext" / "offline" / "family" / "models" / "kvlift-tiny-large"
STRIPPING = "{{ bos_token }}{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('no') }}{% endif %}[{{ m.content | trim }}]{% endfor %}"


@pytest.fixture(scope="module")
def exact() -> ExactPrompts:
    return ExactPrompts(MODEL)


@pytest.fixture(scope="module")
def reference() -> Any:
    """The tokenizer as a worker uses it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


def rendered(reference: Any, text: str) -> list[int]:
    messages = [{"role": "user", "content": text}]
    return list(reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("tokens", [9, 10, 11, 149, 512, 2000])
@pytest.mark.parametrize("index", [0, 391, 392, 5000])
def test_a_prompt_has_exactly_so_many_tokens(exact, reference, tokens, index):
    assert len(rendered(reference, exact.text(3, index, tokens))) == tokens


def test_prompts_share_nothing_but_the_template(exact, reference):
    template = next(
        i
        for i, (a, b) in enumerate(zip(rendered(reference, " hen"), rendered(reference, " gold"), strict=True))
        if a != b
    )
    assert exact.words > 300
    first = {rendered(reference, exact.text(0, index, 40))[template] for index in range(exact.words)}
    assert len(first) == exact.words
    more = [tuple(rendered(reference, exact.text(0, index, 40))[template : template + 2]) for index in range(1000)]
    assert len(set(more)) == 1000


def test_a_prompt_is_made_from_seed_index_and_length(exact):
    asked = [(seed, index, tokens) for seed in (0, 1) for index in (0, 1, 500) for tokens in (50, 51)]
    texts = [exact.text(*one) for one in asked]
    assert len(set(texts)) == len(asked)
    random.Random(0).shuffle(order := list(range(len(asked))))
    again = ExactPrompts(MODEL)
    assert all(again.text(*asked[i]) == texts[i] for i in order)


def test_a_template_that_strips_messages_changes_no_length(tmp_path):
    folder = copy_of_model(tmp_path, STRIPPING)
    made = ExactPrompts(folder)
    from transformers import AutoTokenizer

    stripping = AutoTokenizer.from_pretrained(folder)
    for index in range(50):
        assert len(rendered(stripping, made.text(0, index, 60))) == 60


def copy_of_model(folder: Path, template: str | None) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    config["bos_token"] = "<|endoftext|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.mark.parametrize("tokens", [0, 1, 8])
def test_a_prompt_shorter_than_its_template_is_refused(exact, tokens):
    with pytest.raises(BadPrompt, match="template alone takes 8; ask for 9"):
        exact.text(0, 0, tokens)


@pytest.mark.parametrize(
    ("template", "word"),
    [(None, "no chat template"), ("{% if %}", "cannot be read"), ("{{ raise_exception('no users') }}", "no users")],
)
def test_a_folder_that_cannot_be_used_is_named(tmp_path, template, word):
    with pytest.raises(BadPrompt, match=word):
        ExactPrompts(copy_of_model(tmp_path, template))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(BadPrompt, match="expected a local model folder"):
        ExactPrompts(tmp_path)


def test_each_arrival_gets_its_own_length(exact, reference):
    arrivals = [Arrival(4, 0.0), Arrival(5, 1.0, context_tokens=33)]
    made = for_arrivals(exact, arrivals, seed=2, tokens=20)
    assert {index: len(rendered(reference, text)) for index, text in made.items()} == {4: 20, 5: 33}


def test_plain_prompts_have_so_many_words_and_differ_at_once():
    texts = [PlainPrompts().text(1, index, 30) for index in range(50)]
    assert all(len(text.split()) == 30 for text in texts)
    assert all(a.split()[0] != b.split()[0] for a, b in pairwise(texts))
    assert texts == [PlainPrompts().text(1, index, 30) for index in range(50)]
    with pytest.raises(BadPrompt, match="of 0 tokens"):
        PlainPrompts().text(0, 0, 0)


def test_making_prompts_and_load_never_imports_torch():
    code = (
        "import sys; from pathlib import Path; import loadtest.generator, loadtest.locust_options; "
        "from loadtest.prompts import ExactPrompts; ExactPrompts(Path(sys.argv[1])).text(0, 0, 50); "
        "print([name for name in ('torch', 'transformers', 'sglang') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(MODEL)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
