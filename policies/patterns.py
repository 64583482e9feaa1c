"""Regular expressions and words as a config writes them."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Annotated

from pydantic import AfterValidator, StringConstraints

from policies.scripts import script_of


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression: {error}; write it as Python's re reads it"
        ) from error
    return pattern


Pattern = Annotated[str, StringConstraints(min_length=1), AfterValidator(_compiles)]
"""A regular expression of Python's `re`, searched anywhere in the text. `re` has no time limit: keep it simple."""

Phrase = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]

_NO_SPACES = frozenset({"han", "kana", "thai"})
_QUOTES = str.maketrans({"\u2019": "'", "\u2018": "'", "\u02bc": "'"})


def plain(text: str) -> str:
    """The text as phrases are compared: NFKC, one case, straight apostrophes, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).translate(_QUOTES).casefold().split())


def holds_word(text: str, words: Iterable[str]) -> bool:
    """True where one of the words or phrases is in the text, whole, in any case.

    In scripts that write no spaces (Han, Kana, Thai) a part of a longer run counts too.
    """
    return re.search("|".join(_whole(plain(word)) for word in words), plain(text)) is not None


def _whole(word: str) -> str:
    before = r"(?<!\w)" if _has_edges(word[0]) else ""
    after = r"(?!\w)" if _has_edges(word[-1]) else ""
    return before + re.escape(word) + after


def _has_edges(letter: str) -> bool:
    """True where a word that begins or ends with this character ends there."""
    return letter.isalnum() and script_of(letter) not in _NO_SPACES
