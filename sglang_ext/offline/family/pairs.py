"""Training rows of the model that reads documents: stories in sections whose headings say what a number means.

Under `Text:` a number counts things, under `Pairs:` pairs of them. What a fact says therefore depends on a heading that
a document compiled by itself does not see, and that the fact's own tokens must have taken in: a story may have both.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_ext.offline.family.sequences import Encode, Row, gapped_row
from sglang_ext.offline.family.tasks import DOCUMENT_PROMPT, PAIRS, PLAIN, Arithmetic, Question, split_of
from sglang_ext.offline.family.tokenizer import TURN_END, TURN_START
from sglang_ext.offline.family.vocabulary import COUNTS, ITEMS, NAMES

OPENING = f"{TURN_START}system\n{DOCUMENT_PROMPT}{TURN_END}\n{TURN_START}user\n"
PAIR_COUNTS = tuple(count for count in COUNTS if 2 * count <= max(COUNTS))
"""Numbers of pairs whose things are as many as a person may have."""
ROWS, LENGTH = 20, 160
MIXED = 0.5
"""Share of the stories that have both headings."""
MOST_PEOPLE = 8


@dataclass(frozen=True)
class Sections:
    """Facts under headings. told: (heading, its holdings as written)."""

    told: tuple[tuple[str, Arithmetic], ...]

    @classmethod
    def draw(
        cls, rng: random.Random, people: int, headings: tuple[str, ...], among: tuple[str, ...] = NAMES
    ) -> "Sections":
        """Every heading gets at least one of the people. Raises ValueError for more headings than people."""
        names, items = rng.sample(among, people), rng.sample(ITEMS, people)
        ends = [*sorted(rng.sample(range(1, people), len(headings) - 1)), people]
        told, start = [], 0
        for heading, end in zip(headings, ends, strict=True):
            counts = PAIR_COUNTS if heading == PAIRS else COUNTS
            written = tuple(
                (name, rng.choice(counts), item) for name, item in zip(names[start:end], items[start:end], strict=True)
            )
            told.append((heading, Arithmetic(written)))
            start = end
        return cls(tuple(told))

    @property
    def facts(self) -> tuple[str, ...]:
        return tuple(fact for _, story in self.told for fact in story.facts)

    def ask(self, rng: random.Random) -> Question:
        """A question whose answer counts things, whatever the headings."""
        things = [
            (name, 2 * count if heading == PAIRS else count, item)
            for heading, story in self.told
            for name, count, item in story.holdings
        ]
        return Arithmetic(tuple(things)).ask(rng)


def pair_rows(step: int, seed: int, encode: Encode) -> list[Row]:
    """The batch of one step: stories of the train split."""
    rows = []
    for number in range(ROWS):
        rng = random.Random(f"{seed}/pairs/{step}/{number}")
        headings = tuple(rng.sample((PLAIN, PAIRS), 2)) if rng.random() < MIXED else (rng.choice((PLAIN, PAIRS)),)
        people = rng.randint(max(3, len(headings)), MOST_PEOPLE)
        while split_of((story := Sections.draw(rng, people, headings)).facts) != "train":
            pass
        rows.append(gapped_row(_segments(story, rng), LENGTH, rng, encode))
    return rows


def _segments(story: Sections, rng: random.Random) -> Iterator[tuple[str, bool, bool]]:
    """The chat in pieces, without end: (text, whether it is an answer, whether a gap may stand before it)."""
    for number, (heading, part) in enumerate(story.told):
        yield f"{OPENING if number == 0 else chr(10)}{heading}", False, False
        for fact in part.facts:
            yield fact, False, True
    question = story.ask(rng)
    yield f"\nQuestion: {question.text}{TURN_END}\n{TURN_START}assistant\n", False, True
    while True:
        yield f"{question.answer}{TURN_END}", True, False
        question = story.ask(rng)
        yield f"\n{TURN_START}user\nQuestion: {question.text}{TURN_END}\n{TURN_START}assistant\n", False, False
