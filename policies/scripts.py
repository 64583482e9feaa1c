"""Which script a text is written in. Enough to send what a small model was not trained for to a larger one."""

from __future__ import annotations

import unicodedata
from collections import Counter
from typing import Literal

Script = Literal[
    "latin", "cyrillic", "han", "kana", "hangul", "arabic", "devanagari", "greek", "hebrew", "thai", "other"
]

_BY_NAME: dict[str, Script] = {
    "LATIN": "latin",
    "CYRILLIC": "cyrillic",
    "CJK": "han",
    "HIRAGANA": "kana",
    "KATAKANA": "kana",
    "HANGUL": "hangul",
    "ARABIC": "arabic",
    "DEVANAGARI": "devanagari",
    "GREEK": "greek",
    "HEBREW": "hebrew",
    "THAI": "thai",
}
_WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")
_LOOKED_AT = 4000  # characters; more tell nothing new
_JAPANESE = 0.1  # of Han and Kana letters; Chinese has none


def script_of(letter: str) -> Script | None:
    """The script of one character; None where it is no letter."""
    if not letter.isalpha():
        return None
    name = unicodedata.name(letter, "")
    for width in _WIDTHS:
        name = name.removeprefix(width)
    return _BY_NAME.get(name.split(" ")[0].split("-")[0], "other")


def main_script(text: str) -> Script | None:
    """The script of most of the letters at the text's beginning; None where it has no letter.

    Japanese mixes two: where at least a tenth of the Han and Kana letters are Kana, both count as Kana. Of two
    scripts with equally many letters the one that comes first in the text is named.
    """
    counts = Counter(script for letter in text[:_LOOKED_AT] if (script := script_of(letter)) is not None)
    if not counts:
        return None
    kana, han = counts["kana"], counts["han"]
    if kana and kana >= _JAPANESE * (kana + han):
        counts["kana"] += counts.pop("han", 0)
    return counts.most_common(1)[0][0]
