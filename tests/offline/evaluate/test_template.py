"""Laws of the template: what all prompts of a task share, whatever their order, and nothing of their content."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.offline.corpus import encode
from sglang_ext.offline.evaluate.datasets import load
from sglang_ext.offline.evaluate.template import templates
from tests.kv.builders import laws
from tests.kv.models import tokenizer

prompts_ = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=2, max_size=5)


def test_the_common_ends_and_special_tokens_are_template():
    prompts = [("t", [1, 2, 3, 9, 4, 5]), ("t", [1, 2, 7, 7, 7, 4, 5]), ("t", [1, 2, 3, 8, 0, 5])]
    one = templates(prompts, {9})["t"]
    assert one.mask(prompts[0][1]).tolist() == [True, True, False, True, False, True]
    assert one.mask(prompts[1][1]).tolist() == [True, True, False, False, False, False, True]


@laws
@given(prompts=prompts_, seed=st.randoms())
def test_it_is_the_longest_common_prefix_and_suffix_in_any_order(prompts, seed):
    shuffled = list(prompts)
    seed.shuffle(shuffled)
    found = templates([("t", ids) for ids in prompts], ())["t"]
    assert found == templates([("t", ids) for ids in shuffled], ())["t"]
    for length, ends in ((found.prefix, prompts), (found.suffix, [ids[::-1] for ids in prompts])):
        assert len({tuple(ids[:length]) for ids in ends}) == 1
        longer = {tuple(ids[: length + 1]) for ids in ends}
        assert len(longer) > 1 or min(map(len, ends)) == length


def test_tasks_have_their_own_and_a_single_prompt_has_none():
    found = templates([("a", [1, 2, 3]), ("b", [1, 2]), ("a", [1, 4, 3])], ())
    assert (found["a"].prefix, found["a"].suffix) == (1, 1)
    assert "b" not in found


@pytest.mark.parametrize("task", ["biography", "arithmetic"])
def test_the_familys_template_ends_where_its_facts_begin(task):
    prompts = [(i.task, encode(tokenizer(), i.record)) for i in load("family-dev:12").items]
    one = templates(prompts, tokenizer().all_special_ids)[task]
    for ids in [ids for name, ids in prompts if name == task]:
        mask = one.mask(ids)
        content = tokenizer().decode([token for token, shared in zip(ids, mask) if not shared])
        assert "careful" not in content and "Text" not in content and "assistant" not in content
        assert "Question:" in content
