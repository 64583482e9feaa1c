"""Laws of the task generator: disjoint splits, determinism, scoring."""

import random

import pytest

from sglang_ext.offline.family import tasks
from sglang_ext.offline.family.sequences import CURRICULUM, rows_at, stage_at
from sglang_ext.offline.family.tasks import SPLITS, TASKS, draw_story, is_correct, iter_items, make_item, split_of

ITEMS = 300
ENDS = (0.3, 0.6, 1.0)


@pytest.mark.parametrize("task", TASKS)
def test_no_story_of_one_split_is_in_another(task):
    stories = {
        split: {frozenset(item.facts) for seed in (0, 1) for item in iter_items(task, split, ITEMS, seed=seed)}
        for split in SPLITS
    }
    for split in SPLITS:
        assert len(stories[split]) > ITEMS  # the two seeds give different stories
        others = set().union(*(stories[other] for other in SPLITS if other != split))
        assert not stories[split] & others


@pytest.mark.parametrize("task", TASKS)
def test_the_split_does_not_depend_on_the_order_of_the_facts(task):
    for item in iter_items(task, "test", 50):
        shuffled = random.Random(0).sample(item.facts, len(item.facts))
        assert split_of(tuple(shuffled)) == "test"


def test_the_buckets_are_dealt_out_once():
    dealt = [bucket for buckets in tasks.BUCKETS.values() for bucket in buckets]
    assert sorted(dealt) == list(range(100))


def test_training_rows_tell_stories_of_the_train_split_only(monkeypatch):
    seen = []

    def recorded(task, split, index, **options):
        story, rng = draw_story(task, split, index, **options)
        seen.append(split_of(story.facts))
        return story, rng

    monkeypatch.setattr("sglang_ext.offline.family.sequences.draw_story", recorded)
    for step in range(0, 100, 10):
        rows_at(step, stage_at(step / 100, ENDS), 0, lambda text: [0] * len(text.split()), range(100))
    assert seen and set(seen) == {"train"}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("split", SPLITS)
def test_an_item_is_a_function_of_seed_split_and_index(task, split):
    assert make_item(task, split, 7, seed=3) == make_item(task, split, 7, seed=3)
    assert make_item(task, split, 7, seed=3) != make_item(task, split, 8, seed=3)
    assert make_item(task, split, 7, seed=3) != make_item(task, split, 7, seed=4)


def test_items_do_not_change_between_releases():
    biography, arithmetic = make_item("biography", "test", 0), make_item("arithmetic", "test", 0)
    assert (biography.question, biography.final) == ("Which language does Carl speak?", "Arabic")
    assert (arithmetic.question, arithmetic.final) == ("How many things do Greta, Noah and Leo have together?", "12")


@pytest.mark.parametrize("task", TASKS)
def test_facts_are_a_slice_of_the_prompt_and_the_answer_is_correct(task):
    for item in iter_items(task, "dev", 100):
        assert [message["role"] for message in item.messages] == ["system", "user"]
        assert f"Text:{''.join(item.facts)}\nQuestion: {item.question}" in item.messages[1]["content"]
        assert is_correct(item, item.answer)
        assert is_correct(item, item.final)


def test_the_biography_question_is_answered_by_exactly_one_fact():
    for item in iter_items("biography", "dev", 100):
        assert [f" {item.answer.removeprefix('Answer: ')}" == fact for fact in item.facts].count(True) == 1


@pytest.mark.parametrize("text", ["", "  .", "Answer:", "Answer: nobody knows.", "Answer: 1234."])
@pytest.mark.parametrize("task", TASKS)
def test_wrong_answers_are_wrong(task, text):
    assert not is_correct(make_item(task, "dev", 0), text)


def test_unknown_tasks_and_splits_are_named():
    with pytest.raises(ValueError, match="unknown task 'poetry'"):
        make_item("poetry", "test", 0)
    with pytest.raises(ValueError, match="unknown split 'validation'"):
        make_item("biography", "validation", 0)


def test_rows_are_full_and_their_positions_only_go_up():
    stages = [stage_at(step / 100, ENDS) for step in range(100)]
    assert set(stages) == set(CURRICULUM)
    for step, stage in enumerate(stages):
        for row in rows_at(step, stage, 0, lambda text: [len(word) for word in text.split()], range(100)):
            assert len(row.ids) == len(row.positions) == len(row.trained) == stage.length
            assert all(later > earlier for earlier, later in zip(row.positions, row.positions[1:], strict=False))
            assert any(row.trained) and not row.trained[0]
