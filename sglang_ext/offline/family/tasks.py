"""The two tasks of the tiny family, as a pure function of (seed, split, index).

A *story* is a set of one-sentence facts; a *question* asks about it; an *item* is the chat prompt with one
question and its gold answer. A story belongs to exactly one split: the hash of its facts, sorted, falls into one
of a hundred buckets, and the buckets are dealt out to the splits. Whatever the seed, the index and the
question, no story of one split can therefore turn up in another.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from sglang_ext.offline.family.vocabulary import ATTRIBUTES, COUNTS, ITEMS, MANY_THINGS, NAMES, QUESTIONS, STATEMENTS

TaskName = Literal["biography", "arithmetic"]
Split = Literal["train", "dev", "calibration", "test"]

TASKS: tuple[TaskName, ...] = get_args(TaskName)
SPLITS: tuple[Split, ...] = get_args(Split)

BUCKETS: dict[Split, range] = {
    "train": range(0, 70),
    "dev": range(70, 80),
    "calibration": range(80, 90),
    "test": range(90, 100),
}
PEOPLE: dict[TaskName, int] = {"biography": 4, "arithmetic": 6}
"""People in the story of an item; training also uses smaller stories."""

SYSTEM_PROMPT = (
    "You are a careful assistant that reads a short text and answers one question about it. "
    "Use only what the text says and never guess. Read every sentence of the text before you answer. "
    "The order of the sentences has no meaning, and many of them do not matter for the question. "
    "Do not repeat the question and do not add any other words."
)
DOCUMENT_PROMPT = "You are a careful assistant that reads a short text and answers one question about it."
"""The short system prompt of the document task (`documents/tasks.py`)."""
PLAIN, PAIRS = "Text:", "Pairs:"
"""Headings of the document task: under the second each number counts pairs."""
INSTRUCTIONS: dict[TaskName, str] = {
    "biography": (
        "Here is a text about several people. Find the one sentence that names the person in the question and "
        "says what is asked, and ignore all other people and all other sentences. Then repeat that sentence "
        "word by word after the word Answer, with a full stop at the end."
    ),
    "arithmetic": (
        "Here is a text that says how many things each person has. Take the people in the question one after "
        "the other, say how many things each of them has, and keep a running sum as you go. "
        "Then give the final number after the word Answer, with a full stop at the end."
    ),
}


@dataclass(frozen=True)
class Question:
    """A question on a story, the assistant's gold answer, and the value that is scored."""

    text: str
    answer: str
    final: str


class Story(Protocol):
    """Facts, in the order in which the prompt tells them, and questions that they answer."""

    @property
    def facts(self) -> tuple[str, ...]:
        """One sentence each, with its leading space and full stop: joined, they are the text."""
        ...

    def ask(self, rng: random.Random) -> Question:
        """Draw one question."""
        ...


@dataclass(frozen=True)
class Biography:
    """Two attributes of every person; all people share the two kinds, so the kind alone answers nothing."""

    entries: tuple[tuple[str, str, str], ...]
    """(name, attribute kind, value)"""

    @classmethod
    def draw(cls, rng: random.Random, people: int) -> "Biography":
        names = rng.sample(NAMES, people)
        entries = [
            (name, kind, value)
            for kind in rng.sample(sorted(ATTRIBUTES), 2)
            for name, value in zip(names, rng.sample(ATTRIBUTES[kind], people), strict=True)
        ]
        rng.shuffle(entries)
        return cls(tuple(entries))

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(f" {STATEMENTS[kind].format(name=name, value=value)}." for name, kind, value in self.entries)

    def ask(self, rng: random.Random) -> Question:
        name, kind, value = rng.choice(self.entries)
        statement = STATEMENTS[kind].format(name=name, value=value)
        return Question(QUESTIONS[kind].format(name=name), f"Answer: {statement}.", value)


@dataclass(frozen=True)
class Arithmetic:
    """Every person has a number of things; a question adds two or three of the numbers."""

    holdings: tuple[tuple[str, int, str], ...]
    """(name, count, item)"""

    @classmethod
    def draw(cls, rng: random.Random, people: int, among: Sequence[str] = NAMES) -> "Arithmetic":
        names, items = rng.sample(among, people), rng.sample(ITEMS, people)
        return cls(tuple((name, rng.choice(COUNTS), item) for name, item in zip(names, items, strict=True)))

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(f" {name} has {count} {item}." for name, count, item in self.holdings)

    def ask(self, rng: random.Random) -> Question:
        chosen = rng.sample(self.holdings, min(rng.choice((2, 3)), len(self.holdings)))
        names = [name for name, _, _ in chosen]
        (first, total, _), *rest = chosen
        steps = [f"Steps: {first} has {total}."]
        for name, count, _ in rest:
            steps.append(f"{name} has {count}, {total} + {count} = {total + count}.")
            total += count
        text = MANY_THINGS.format(names=f"{', '.join(names[:-1])} and {names[-1]}")
        return Question(text, f"{' '.join(steps)} Answer: {total}.", str(total))


_STORIES: dict[TaskName, type[Biography] | type[Arithmetic]] = {"biography": Biography, "arithmetic": Arithmetic}


@dataclass(frozen=True)
class Item:
    """One prompt of a task with its gold answer."""

    task: TaskName
    split: Split
    index: int
    messages: tuple[dict[str, str], ...]
    """system and user message, in the form of OpenAI's chat API"""
    answer: str
    final: str
    facts: tuple[str, ...]
    """the content sentences; joined, they are a slice of the user message"""
    question: str


def split_of(facts: tuple[str, ...]) -> Split:
    """The split that owns the story made of these facts, in whatever order."""
    digest = hashlib.blake2b("\n".join(sorted(facts)).encode(), digest_size=8).digest()
    bucket = int.from_bytes(digest, "big") % 100
    return next(split for split, buckets in BUCKETS.items() if bucket in buckets)


def draw_story(
    task: TaskName, split: Split, index: int, *, seed: int = 0, people: int | None = None
) -> tuple[Story, random.Random]:
    """Story number ``index`` of a split, and the generator from which to draw its questions."""
    if task not in TASKS:
        raise ValueError(f"unknown task {task!r}: expected one of {', '.join(TASKS)}")
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: expected one of {', '.join(SPLITS)}")
    rng = random.Random(f"{seed}/{task}/{split}/{index}")
    while True:
        story = _STORIES[task].draw(rng, people or PEOPLE[task])
        if split_of(story.facts) == split:
            return story, rng


def user_message(task: TaskName, facts: tuple[str, ...], question: str) -> str:
    """The user's side of a prompt: the task's instruction, the text, the question."""
    return f"{INSTRUCTIONS[task]}\nText:{''.join(facts)}\nQuestion: {question}"


def make_item(task: TaskName, split: Split, index: int, *, seed: int = 0) -> Item:
    """Item number ``index`` of a split."""
    story, rng = draw_story(task, split, index, seed=seed)
    question = story.ask(rng)
    messages = (
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": user_message(task, story.facts, question.text)},
    )
    return Item(task, split, index, messages, question.answer, question.final, story.facts, question.text)


def iter_items(task: TaskName, split: Split, count: int, *, start: int = 0, seed: int = 0) -> Iterator[Item]:
    """Items ``start`` to ``start + count - 1`` of a split."""
    return (make_item(task, split, index, seed=seed) for index in range(start, start + count))


def is_correct(item: Item, text: str) -> bool:
    """Whether the last word of an answer is the item's final value."""
    words = re.findall(r"\w+", text)
    return bool(words) and words[-1] == item.final
