"""Laws of the tokenizer and its chat template."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offline.family import tokenizer as family
from sglang_ext.offline.family.tasks import TASKS, iter_items
from sglang_ext.offline.family.vocabulary import content_words

transformers = pytest.importorskip("transformers")

MODELS = Path(family.__file__).parent / "models"
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(MODELS / "kvlift-tiny-large")


@given(text=st.text())
def test_any_text_survives_a_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_content_word_is_one_token(tokenizer):
    pieces = {word: tokenizer.tokenize(f" {word}") for word in content_words()}
    assert {word: tokens for word, tokens in pieces.items() if len(tokens) != 1} == {}


def test_both_models_carry_the_tokenizer_that_the_words_give(tokenizer):
    other = transformers.AutoTokenizer.from_pretrained(MODELS / "kvlift-tiny-small")
    built = family.build_tokenizer()
    assert built.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert built.chat_template == tokenizer.chat_template == other.chat_template
    assert 900 <= len(tokenizer) <= 1100


def test_special_tokens_are_one_token_each(tokenizer):
    for special in (family.END_OF_TEXT, family.TURN_START, family.TURN_END):
        assert len(tokenizer.encode(special)) == 1
    assert tokenizer.eos_token == family.TURN_END


@pytest.mark.parametrize("task", TASKS)
def test_the_prompt_is_a_prefix_of_the_conversation(tokenizer, task):
    for item in iter_items(task, "dev", 20):
        prompt = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, return_dict=False)
        reply = {"role": "assistant", "content": item.answer}
        whole = tokenizer.apply_chat_template([*item.messages, reply], return_dict=False)
        assert whole[: len(prompt)] == prompt
        assert whole[len(prompt) :] == tokenizer.encode(f"{item.answer}{family.TURN_END}\n")


@pytest.mark.parametrize("task", TASKS)
def test_the_next_turn_extends_the_conversation(tokenizer, task):
    item = next(iter_items(task, "dev", 1))
    first = [*item.messages, {"role": "assistant", "content": item.answer}]
    second = [*first, {"role": "user", "content": "Question: Where does Tom live?"}]
    whole = tokenizer.apply_chat_template(second, add_generation_prompt=True, tokenize=False)
    assert whole.startswith(tokenizer.apply_chat_template(first, tokenize=False))


@pytest.mark.parametrize("task", TASKS)
def test_facts_are_a_slice_of_the_prompts_tokens(tokenizer, task):
    for item in iter_items(task, "dev", 20):
        prompt = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, tokenize=False)
        before, after = prompt.split("".join(item.facts))
        pieces = [before, *item.facts, after]
        assert sum((tokenizer.encode(piece) for piece in pieces), []) == tokenizer.encode(prompt)


@pytest.mark.parametrize("task", TASKS)
def test_most_of_a_prompt_is_the_same_in_every_prompt(tokenizer, task):
    for item in iter_items(task, "dev", 20):
        prompt = tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, return_dict=False)
        unique = sum(len(tokenizer.encode(text)) for text in (*item.facts, item.question))
        assert 110 <= len(prompt) <= 200
        assert unique <= 0.26 * len(prompt)


def test_the_template_takes_tools_empty_content_and_unknown_arguments(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None},
    ]
    with_tool = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, enable_thinking=False)
    assert with_tool.count(family.TURN_START) == 3
    assert "Be brief." in with_tool and "look_up" in with_tool
    without_system = tokenizer.apply_chat_template(messages[1:], tools=[TOOL], tokenize=False)
    assert without_system.startswith(f"{family.TURN_START}system\nTools:")
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    )
