"""Rules on the request: what passes the small model by. Texts are those of the last user message."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from policies.patterns import Pattern, Phrase, holds_word
from policies.rules import NO_SIGNAL, RequestRule
from policies.scripts import Script, main_script
from policies.signals import RequestFacts


class Length(RequestRule):
    """Escalates a prompt of more than `characters` (all messages) or more than `tokens`, whichever is set.

    Default: 8,000 characters, about 2,000 tokens of English. Word: `prompt_length`.
    """

    method: Literal["length"] = "length"
    characters: int | None = Field(default=8000, ge=0)
    tokens: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _bounds_something(self) -> Length:
        if self.characters is None and self.tokens is None:
            raise ValueError("neither characters nor tokens is set; set one of them, or leave the rule out")
        return self

    def match(self, facts: RequestFacts) -> str | None:
        measured = [(self.characters, facts.characters), (self.tokens, facts.prompt_tokens)]
        bounded = [(limit, length) for limit, length in measured if limit is not None]
        if any(length is not None and length > limit for limit, length in bounded):
            return "prompt_length"
        return NO_SIGNAL if any(length is None for _, length in bounded) else None


class Keywords(RequestRule):
    """Escalates a request that holds one of `words`, whole and in any case. Word: `keyword`.

    The default words ask for proofs, calculus and work on code.
    """

    method: Literal["keywords"] = "keywords"
    words: tuple[Phrase, ...] = Field(
        default=("prove", "proof", "theorem", "derive", "integral", "step by step", "debug", "refactor"), min_length=1
    )

    def match(self, facts: RequestFacts) -> str | None:
        if facts.text is None:
            return NO_SIGNAL
        return "keyword" if holds_word(facts.text, self.words) else None


class Regex(RequestRule):
    """Escalates a request in which `pattern` is found. Word: `pattern`. The default finds fenced code and LaTeX."""

    method: Literal["regex"] = "regex"
    pattern: Pattern = r"```|\$\$|\\\(|\\\[|\\begin\{"

    def match(self, facts: RequestFacts) -> str | None:
        if facts.text is None:
            return NO_SIGNAL
        return "pattern" if re.search(self.pattern, facts.text) else None


class Tools(RequestRule):
    """Escalates a request that offers tools. Word: `tools`."""

    method: Literal["tools"] = "tools"

    def match(self, facts: RequestFacts) -> str | None:
        return "tools" if facts.has_tools else None


class JsonAsked(RequestRule):
    """Escalates a request for JSON: a `response_format` other than text. Word: `json_asked`."""

    method: Literal["json_asked"] = "json_asked"

    def match(self, facts: RequestFacts) -> str | None:
        return "json_asked" if facts.wants_json else None


class Language(RequestRule):
    """Escalates a request that is mostly in a script other than those `known`. Word: `language`.

    The script, not the language, is told apart: see `policies.scripts.main_script`. A text without letters is in
    none and passes. Default: Latin alone.
    """

    method: Literal["language"] = "language"
    known: tuple[Script, ...] = Field(default=("latin",), min_length=1)

    def match(self, facts: RequestFacts) -> str | None:
        if facts.text is None:
            return NO_SIGNAL
        script = main_script(facts.text)
        return "language" if script is not None and script not in self.known else None
