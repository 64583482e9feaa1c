"""How right an answer is: the last number, the letter of a choice, or the overlap of words."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal

# A minus sign behind a digit is a subtraction; commas are read as separators of thousands.
_NUMBER = re.compile(r"(?<![\d.])-?\d[\d,]*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def last_number(text: str) -> Decimal | None:
    """The last number in a text, or None."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def same_number(text: str, gold: tuple[str, ...]) -> float:
    """1.0 where the last number is one of the gold ones, however it is written (18, 18.00, $18)."""
    value = last_number(text)
    return float(value is not None and value in {last_number(one) for one in gold})


def chosen_label(text: str) -> str | None:
    """The label that an answer names: the one behind its last `answer`, else the one that it starts with.

    A label is one letter A to J or digit 1 to 5, alone, in brackets or not. A letter that starts a sentence, as in
    "A robe", is none. Returns None where there is neither.
    """
    label = r"[(\[*\s]*([A-J1-5])(?![\w'])"
    named = re.findall(rf"(?i:answer)(?i:\s+is)?[\s:*]*{label}", text)
    if named:
        return named[-1]
    leading = re.match(rf"{label}(?!\s+[a-z])", text)
    return leading.group(1) if leading else None


def same_label(text: str, gold: tuple[str, ...]) -> float:
    """1.0 where the answer names a gold label."""
    return float(chosen_label(text) in gold)


def words(text: str) -> list[str]:
    """The words that count for F1: lower case, without punctuation and without a, an, the."""
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def token_f1(text: str, gold: tuple[str, ...]) -> float:
    """The harmonic mean of precision and recall of words, against the gold answer that fits best."""
    return max(_f1(words(text), words(one)) for one in gold)


def same_words(text: str, gold: tuple[str, ...]) -> float:
    """1.0 where the answer's words are exactly those of a gold answer."""
    return float(words(text) in [words(one) for one in gold])


def micro_f1(answers: Iterable[tuple[str, tuple[str, ...]]]) -> float:
    """Corpus micro-F1 over (text, gold answers): words pooled over all of them (SemPIC, appendix D).

    Each text is held against the gold answer that fits best.
    """
    shared = total = 0
    for text, gold in answers:
        best = max(gold, key=lambda one: _f1(words(text), words(one)))
        shared += sum((Counter(words(text)) & Counter(words(best))).values())
        total += len(words(text)) + len(words(best))
    return 2 * shared / total if total else 1.0


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold))
