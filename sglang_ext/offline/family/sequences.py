"""Training rows: many questions on one story, in one chat, and the curriculum that decides how hard they are.

A prompt of the tasks asks one question about half a dozen facts, which is little to learn from. A training row
therefore goes on asking until it is full, and every answer is trained on. Some rows leave gaps between the
positions of their facts, as linked documents do, and some of the first rows are plain repeated words.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from sglang_ext.offline.family.tasks import PEOPLE, SYSTEM_PROMPT, Story, TaskName, draw_story, user_message
from sglang_ext.offline.family.tokenizer import TURN_END, TURN_START

Encode = Callable[[str], list[int]]

GAP_SHARE = 0.3
"""Share of the rows whose facts stand at positions with gaps between them."""
GAP_LIMIT = 32
"""Largest gap before one fact, in tokens."""


@dataclass(frozen=True)
class Stage:
    """A part of the curriculum."""

    rows: int
    length: int
    """tokens per row"""
    template: float
    """share of the rows that carry the system prompt and the instruction"""
    whole: float
    """share of the rows that tell a story of full size; the others tell a smaller one"""
    recall: float
    """share of the rows that are repeated words"""


CURRICULUM: tuple[Stage, ...] = (
    Stage(rows=16, length=256, template=0.0, whole=0.25, recall=0.25),
    Stage(rows=12, length=384, template=0.75, whole=0.75, recall=0.0),
    Stage(rows=16, length=256, template=1.0, whole=1.0, recall=0.0),
)


@dataclass(frozen=True)
class Row:
    """One training sequence; the three lists are of equal length."""

    ids: list[int]
    positions: list[int]
    trained: list[bool]
    """whether the model is trained to predict this token"""


def stage_at(progress: float, ends: tuple[float, ...]) -> Stage:
    """The stage at a share of all steps; ``ends`` are the shares at which the stages end, the last one being 1."""
    return next(stage for stage, end in zip(CURRICULUM, ends, strict=True) if progress < end)


def rows_at(
    step: int, stage: Stage, seed: int, encode: Encode, words: Sequence[int], *, biographies: float = 0.5
) -> list[Row]:
    """The batch of one step.

    words: the token ids from which repeated rows are made.
    biographies: share of the chats that are about a biography; they are spread evenly over the batch.
    """
    rows = []
    for number in range(stage.rows):
        rng = random.Random(f"{seed}/{step}/{number}")
        if rng.random() < stage.recall:
            rows.append(recall_row(stage.length, rng, words))
        else:
            is_biography = ceil((number + 1) * biographies) > ceil(number * biographies)
            task: TaskName = "biography" if is_biography else "arithmetic"
            people = PEOPLE[task] if rng.random() < stage.whole else rng.randint(2, PEOPLE[task])
            story, _ = draw_story(task, "train", step * 1000 + number, seed=seed, people=people)
            rows.append(chat_row(task, story, stage.length, rng, encode, template=rng.random() < stage.template))
    return rows


def recall_row(length: int, rng: random.Random, words: Sequence[int]) -> Row:
    """Random words, repeated until the row is full; all repetitions are trained."""
    period = rng.randint(4, 40)
    ids = (rng.sample(words, period) * (length // period + 1))[:length]
    return Row(ids, list(range(length)), [position >= period for position in range(length)])


def chat_row(task: TaskName, story: Story, length: int, rng: random.Random, encode: Encode, *, template: bool) -> Row:
    """Question after question on one story; answers are trained, with the token that ends them."""
    row = gapped_row(_segments(task, story, rng, template=template), length, rng, encode)
    if len(row.ids) < length:
        raise AssertionError("a story has no last question")
    return row


def gapped_row(segments: Iterable[tuple[str, bool, bool]], length: int, rng: random.Random, encode: Encode) -> Row:
    """The first `length` tokens of (text, is it trained, may a gap in position come before it).

    A share GAP_SHARE of the rows has gaps. Segments are drawn one by one, after `rng` has said whether this row has.
    """
    gap_limit = GAP_LIMIT if rng.random() < GAP_SHARE else 0
    ids, positions, trained = [], [], []
    next_position = 0
    for text, is_trained, movable in segments:
        tokens = encode(text)
        next_position += rng.randint(0, gap_limit) if movable else 0
        ids += tokens
        positions += range(next_position, next_position + len(tokens))
        trained += [is_trained] * len(tokens)
        next_position += len(tokens)
        if len(ids) >= length:
            break
    return Row(ids[:length], positions[:length], trained[:length])


def _segments(
    task: TaskName, story: Story, rng: random.Random, *, template: bool
) -> Iterator[tuple[str, bool, bool]]:
    """The chat in pieces, without end: (text, whether it is an answer, whether a gap may stand before it)."""
    question = story.ask(rng)
    if template:
        before, after = user_message(task, ("\0",), question.text).split("\0")
        yield f"{TURN_START}system\n{SYSTEM_PROMPT}{TURN_END}\n{TURN_START}user\n{before}", False, False
    else:
        after = f"\nQuestion: {question.text}"
        yield f"{TURN_START}user\nText:", False, False
    for fact in story.facts:
        yield fact, False, True
    yield f"{after}{TURN_END}\n{TURN_START}assistant\n", False, True
    while True:
        yield f"{question.answer}{TURN_END}", True, False
        question = story.ask(rng)
        yield f"\n{TURN_START}user\nQuestion: {question.text}{TURN_END}\n{TURN_START}assistant\n", False, False
