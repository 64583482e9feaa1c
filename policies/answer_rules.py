"""Rules on the complete answer: text that says no, says nothing, or is not what was asked for."""

from __future__ import annotations

import json
import re
from typing import Any, Literal, NoReturn

from pydantic import Field

from policies.patterns import Pattern, Phrase, plain
from policies.rules import NO_SIGNAL, AnswerRule
from policies.signals import Finish, RequestFacts


class AnswerRegex(AnswerRule):
    """Escalates an answer in which `pattern` is found. Word: `answer_pattern`. The default finds hedged English."""

    method: Literal["answer_regex"] = "answer_regex"
    pattern: Pattern = r"(?i)\bI(?:['\u2019]m| am) not (?:sure|certain)\b|\bI don['\u2019]t know\b"

    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        if finish.text is None:
            return NO_SIGNAL
        return "answer_pattern" if re.search(self.pattern, finish.text) else None


class Refusal(AnswerRule):
    """Escalates an answer that declines: one of `phrases` in its first `within` characters. Word: `refusal`.

    Compared in any case and with any apostrophe. The default phrases are English; 200 characters.
    """

    method: Literal["refusal"] = "refusal"
    phrases: tuple[Phrase, ...] = Field(
        default=(
            "I can't help",
            "I cannot help",
            "I can't assist",
            "I cannot assist",
            "I can't provide",
            "I cannot provide",
            "I'm unable to",
            "I am unable to",
            "I'm not able to",
            "I am not able to",
            "I won't be able to",
            "I'm sorry, but",
            "I am sorry, but",
            "As an AI",
        ),
        min_length=1,
    )
    within: int = Field(default=200, ge=1)

    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        if finish.text is None:
            return NO_SIGNAL
        start = plain(finish.text[: self.within])
        return "refusal" if any(plain(phrase) in start for phrase in self.phrases) else None


class Empty(AnswerRule):
    """Escalates an answer with neither text nor a tool call. Word: `empty_answer`."""

    method: Literal["empty"] = "empty"

    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        if finish.says_nothing():
            return "empty_answer"
        return NO_SIGNAL if finish.text is None and not finish.tool_calls else None


class InvalidJson(AnswerRule):
    """Escalates text that is not JSON where the request asked for JSON. Word: `invalid_json`.

    Strict: no text around it, no NaN. An answer that calls tools in place of text passes.
    """

    method: Literal["invalid_json"] = "invalid_json"

    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        if not facts.wants_json or finish.tool_calls:
            return None
        if finish.text is None:
            return NO_SIGNAL
        return None if _parsed(finish.text) is not _BROKEN else "invalid_json"


class InvalidToolCall(AnswerRule):
    """Escalates a tool call whose arguments are not a JSON object, or whose tool was not offered.

    Words: `invalid_arguments`, `unknown_tool`. An answer without calls passes.
    """

    method: Literal["invalid_tool_call"] = "invalid_tool_call"

    def match(self, facts: RequestFacts, finish: Finish) -> str | None:
        if finish.tool_calls is None:
            return NO_SIGNAL
        for call in finish.tool_calls:
            if facts.tool_names is None:
                return NO_SIGNAL
            if call.name not in facts.tool_names:
                return "unknown_tool"
            if not isinstance(_parsed(call.arguments), dict):
                return "invalid_arguments"
        return None


_BROKEN = object()


def _parsed(text: str) -> Any:
    """The JSON value of the text, or `_BROKEN`."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _BROKEN


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
