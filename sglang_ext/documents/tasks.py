"""The tiny document task: facts told in documents, and a question that needs two or three of them.

An item is a story under the heading `Pairs:` (`offline/family/pairs.py`), which says that each number counts pairs, and
whose facts are dealt out to documents as a layout says. The heading is inline: a document compiled by itself does not
see it, and the model has learned to read it while it reads the facts. An item is a pure function of (layout, split,
index, order, seed). Writers train on the names of `TRAIN_NAMES` and are measured on those of `HELD_OUT_NAMES`; besides,
each story belongs to the split that the hash of its facts says.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sglang_ext.errors import DocumentError
from sglang_ext.offline.family.pairs import OPENING, Sections
from sglang_ext.offline.family.tasks import DOCUMENT_PROMPT, PAIRS, Split, split_of
from sglang_ext.offline.family.tokenizer import TURN_END, TURN_START
from sglang_ext.offline.family.vocabulary import NAMES

HELD_OUT_NAMES: tuple[str, ...] = NAMES[::4]
TRAIN_NAMES: tuple[str, ...] = tuple(name for name in NAMES if name not in HELD_OUT_NAMES)

_WORD = re.compile(r" [^ ]+")


@dataclass(frozen=True)
class Part:
    """A number of facts in one span of the prompt: a document, or inline text that no compiler sees."""

    facts: int
    document: bool = True


@dataclass(frozen=True)
class Layout:
    """How facts are dealt out.

    cut: words of the next document's first sentence that each document but the last takes over, so that both are cut in
    mid-sentence. What a document lacks then no Writer can know: the negative control.
    """

    name: str
    parts: tuple[Part, ...]
    cut: int = 0

    @property
    def facts(self) -> int:
        return sum(part.facts for part in self.parts)


def _documents(count: int, facts: int) -> tuple[Part, ...]:
    return (Part(facts),) * count


TRAINED: tuple[Layout, ...] = (
    Layout("6x1", _documents(6, 1)),
    Layout("3x2", _documents(3, 2)),
    Layout("2x3", _documents(2, 3)),
)
"""The layouts that Writers are trained on."""

UNSEEN: tuple[Layout, ...] = (
    Layout("8x1", _documents(8, 1)),
    Layout("4x2", _documents(4, 2)),
    Layout("inline", (Part(2), Part(1, document=False), Part(2), Part(1, document=False), Part(1))),
)
"""Layouts that no Writer is trained on: more documents, and facts between the documents that are inline."""

CUT = Layout("cut", _documents(3, 2), cut=2)

LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (*TRAINED, *UNSEEN, CUT)}


@dataclass(frozen=True)
class Span:
    """A piece of the prompt's text, with its leading space where it starts a sentence."""

    text: str
    document: bool


@dataclass(frozen=True)
class DocumentItem:
    """One prompt; its spans' texts, joined, are what the chat template renders, and so are their tokens."""

    layout: str
    split: Split
    index: int
    order: int
    spans: tuple[Span, ...]
    question: str
    answer: str
    final: str

    @property
    def text(self) -> str:
        return "".join(span.text for span in self.spans)


def make_item(layout: Layout, split: Split, index: int, *, order: int = 0, seed: int = 0) -> DocumentItem:
    """Item number `index` of a split.

    order: 0 tells the parts as drawn, each other number shuffles them; facts, documents and question stay the same.
    A layout with a cut keeps its order, or its halves of sentences would meet strangers.
    """
    names = TRAIN_NAMES if split == "train" else HELD_OUT_NAMES
    rng = random.Random(f"{seed}/{layout.name}/{split}/{index}")
    story = _draw(rng, split, layout.facts, names)
    question = story.ask(rng)
    told = _told(layout, story.facts)
    if order and not layout.cut:
        random.Random(f"{seed}/{layout.name}/{split}/{index}/{order}").shuffle(told)
    before = f"{OPENING}{PAIRS}"
    after = f"\nQuestion: {question.text}{TURN_END}\n{TURN_START}assistant\n"
    spans = (Span(before, False), *told, Span(after, False))
    return DocumentItem(layout.name, split, index, order, spans, question.text, question.answer, question.final)


def iter_items(
    layouts: Sequence[str], split: Split, count: int, *, start: int = 0, orders: int = 1, seed: int = 0
) -> Iterator[DocumentItem]:
    """`count` items of each layout, all layouts in turn; item by item the next of `orders` orders.

    Raises DocumentError for a layout that is not in LAYOUTS.
    """
    unknown = [name for name in layouts if name not in LAYOUTS]
    if unknown:
        raise DocumentError(f"unknown layouts {', '.join(unknown)}; expected some of {', '.join(LAYOUTS)}")
    for index in range(start, start + count):
        for name in layouts:
            yield make_item(LAYOUTS[name], split, index, order=index % orders, seed=seed)


def messages(item: DocumentItem) -> list[dict[str, str]]:
    """The item as a chat request, all documents as plain text."""
    told = "".join(span.text for span in item.spans[1:-1])
    return [
        {"role": "system", "content": DOCUMENT_PROMPT},
        {"role": "user", "content": f"{PAIRS}{told}\nQuestion: {item.question}"},
    ]


def _draw(rng: random.Random, split: Split, people: int, names: tuple[str, ...]) -> Sections:
    while True:
        story = Sections.draw(rng, people, (PAIRS,), names)
        if split_of(story.facts) == split:
            return story


def _told(layout: Layout, facts: Sequence[str]) -> list[Span]:
    """The spans that tell the facts, in the order drawn."""
    rest = iter(facts)
    words = [_WORD.findall("".join(next(rest) for _ in range(part.facts))) for part in layout.parts]
    for taker, giver in pairwise(words):
        taker += giver[: layout.cut]
        del giver[: layout.cut]
    return [Span("".join(own), part.document) for own, part in zip(words, layout.parts, strict=True)]
