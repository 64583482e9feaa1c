"""Generated tasks whose facts stand in documents: the tiny document task, the family's by sentence, needles in haystacks.

All are scored on the whole answer. They name the slices of their prompts that are documents; what runs them without
compiled documents sees ordinary prompts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from sglang_ext.documents import tasks as tiny
from sglang_ext.offline.evaluate.datasets.items import Item
from sglang_ext.offline.family import tasks
from sglang_ext.offline.family.evaluate import MAX_ANSWER_TOKENS
from sglang_ext.offline.family.vocabulary import ATTRIBUTES, NAMES, QUESTIONS, STATEMENTS

ORDERS = 3  # of the documents of the tiny task, item by item
HAYSTACK_DOCUMENTS, HAYSTACK_SENTENCES = 4, 6


def read_tiny(layouts: Sequence[str], count: int) -> Iterator[Item]:
    """The first `count` held-out items of each layout of the tiny document task; the layout is the task."""
    for made in tiny.iter_items(layouts, "test", count, orders=ORDERS):
        documents = tuple(span.text for span in made.spans if span.document)
        name = f"{made.split}/{made.layout}/{made.index}"
        yield _item(name, made.layout, tiny.messages(made), made.answer, documents)


def read_sentences(task: tasks.TaskName, split: tasks.Split, count: int) -> Iterator[Item]:
    """A task of the family, each sentence of its text a document."""
    for made in tasks.iter_items(task, split, count):
        yield _item(f"{split}/{task}/{made.index}", task, made.messages, made.answer, made.facts)


def read_needles(count: int) -> Iterator[Item]:
    """One sentence that answers the question, in documents of sentences of other kinds about other people."""
    for index in range(count):
        rng = random.Random(f"needle/{index}")
        kind = rng.choice(sorted(ATTRIBUTES))
        name, *others = rng.sample(NAMES, len(NAMES))
        needle = STATEMENTS[kind].format(name=name, value=rng.choice(ATTRIBUTES[kind]))
        hay = [_sentence(rng, one, kind) for one in others[: HAYSTACK_DOCUMENTS * HAYSTACK_SENTENCES]]
        hay[rng.randrange(len(hay))] = f" {needle}."
        documents = tuple("".join(hay[at : at + HAYSTACK_SENTENCES]) for at in range(0, len(hay), HAYSTACK_SENTENCES))
        question = QUESTIONS[kind].format(name=name)
        messages = [
            {"role": "system", "content": tasks.SYSTEM_PROMPT},
            {"role": "user", "content": tasks.user_message("biography", documents, question)},
        ]
        yield _item(f"needle/{index}", "needle", messages, f"Answer: {needle}.", documents)


def _sentence(rng: random.Random, name: str, other_than: str) -> str:
    kind = rng.choice(sorted(ATTRIBUTES.keys() - {other_than}))
    return f" {STATEMENTS[kind].format(name=name, value=rng.choice(ATTRIBUTES[kind]))}."


def _item(name: str, task: str, messages: Sequence[dict[str, str]], answer: str, documents: tuple[str, ...]) -> Item:
    record = {"messages": list(messages)}
    return Item(name, task, record, (answer,), _same, "accuracy", MAX_ANSWER_TOKENS, documents)


def _same(text: str, gold: tuple[str, ...]) -> float:
    return float(text.strip() in gold)
