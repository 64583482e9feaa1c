"""One event of a worker's answer, and what it means.

A streamed answer is many events; a buffered one is a single event that holds a message where the others hold
deltas. A completion's events hold a text in place of either. Whoever reads an answer need not know which.
"""

from __future__ import annotations

import json
import math
from itertools import zip_longest
from typing import Any

from policies import Token

_NOT_CONTENT = frozenset({"role"})
_PLAIN_TEXT = frozenset({"role", "content"})


class Malformed(Exception):
    """What came is not an event of an answer."""


class AnswerEvent:
    """One event. `body` is what the worker's text parses to, with the changes that were made since."""

    __slots__ = ("_raw", "body", "choices")

    def __init__(self, raw: str) -> None:
        """Raises `Malformed`."""
        self._raw: str | None = raw  # None once the body was changed
        try:
            self.body: dict[str, Any] = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"not JSON: {raw[:80]!r}") from error
        if not isinstance(self.body, dict):
            raise Malformed(f"not a JSON object: {raw[:80]!r}")
        self.choices: list[dict[str, Any]] = self.body.get("choices") or []
        if not isinstance(self.choices, list) or not all(_is_choice(choice) for choice in self.choices):
            raise Malformed(f"choices is not a list of answers: {raw[:80]!r}")

    @property
    def data(self) -> str:
        """As JSON: the worker's own text where nothing was changed."""
        return json.dumps(self.body, separators=(",", ":")) if self._raw is None else self._raw

    @property
    def error(self) -> Any:
        """The error that the worker sent in place of an answer, or None."""
        return self.body.get("error")

    @property
    def usage(self) -> dict[str, Any] | None:
        usage = self.body.get("usage")
        return usage if isinstance(usage, dict) else None

    @property
    def is_usage_only(self) -> bool:
        return not self.choices and self.usage is not None

    def has_content(self) -> bool:
        """True where there is something to show: anything in a delta or message but the role."""
        return any(_has_content(choice) for choice in self.choices)

    def has_other_than_text(self) -> bool:
        """True where a delta or message says what is no text: reasoning, a tool call, or what is not known here."""
        return any(value and key not in _PLAIN_TEXT for choice in self.choices for key, value in _told(choice).items())

    def finishes(self) -> dict[int, str]:
        """The finish reason of each choice that ends here, by the choice's index."""
        return {
            choice.get("index", 0): choice["finish_reason"] for choice in self.choices if choice.get("finish_reason")
        }

    def indices(self) -> set[int]:
        return {choice.get("index", 0) for choice in self.choices}

    def tokens(self) -> list[Token]:
        """The answer's tokens in this event. Content without log-probabilities counts as one unmeasured token."""
        tokens: list[Token] = []
        for choice in self.choices:
            if entries := _entries(choice):
                tokens += [_token(entry) for entry in entries]
            elif _has_content(choice):
                tokens.append(Token(None))
        return tokens

    def text(self) -> str:
        parts = (choice.get("text") or _told(choice).get("content") for choice in self.choices)
        return "".join(part for part in parts if isinstance(part, str))

    def tool_calls(self) -> list[tuple[int, dict[str, Any]]]:
        """Calls, or pieces of them, each with the index of the call in the answer.

        In a message a call's index is its place: some workers write there which of the tools it is.
        """
        calls: list[tuple[int, dict[str, Any]]] = []
        for choice in self.choices:
            pieces = _told(choice).get("tool_calls")
            for place, piece in enumerate(pieces if isinstance(pieces, list) else []):
                function = piece.get("function") if isinstance(piece, dict) else None
                if isinstance(function, dict):
                    told = piece.get("index") if choice.get("delta") else None
                    calls.append((told if type(told) is int else place, function))
        return calls

    def first_alternatives(self) -> list[tuple[str, float]]:
        """Text and log-probability of the likeliest first tokens of this event; empty where it tells none."""
        return next((_alternatives(entry) for choice in self.choices for entry in _entries(choice)), [])

    def show_logprobs(self, top: int | None) -> None:
        """Leaves `top` alternatives per token in the body, None: no log-probabilities."""
        for choice in self.choices:
            logprobs = choice.get("logprobs")
            if not logprobs:
                continue
            if top is None:
                choice["logprobs"] = None
                self._raw = None
            elif "content" in logprobs:
                for entry in logprobs["content"] or []:
                    if len(entry.get("top_logprobs") or ()) > top:
                        entry["top_logprobs"] = entry["top_logprobs"][:top]
                        self._raw = None
            elif any(len(told or ()) > top for told in logprobs.get("top_logprobs") or ()):
                cut = [dict(list((told or {}).items())[:top]) for told in logprobs["top_logprobs"]]
                logprobs["top_logprobs"] = cut if top else []  # as a worker that was asked for none
                self._raw = None

    def drop_role(self) -> bool:
        """Takes the role out, which is told once in an answer. False where nothing is left to tell."""
        for choice in self.choices:
            if "role" in _told(choice):
                del _told(choice)["role"]
                self._raw = None
        return self._raw is not None or bool(self.tokens() or self.finishes())

    def add(self, key: str, value: Any) -> None:
        """Puts an extension field into the body."""
        self.body[key] = value
        self._raw = None


def _is_choice(choice: Any) -> bool:
    if not isinstance(choice, dict) or not isinstance(choice.get("index", 0), int):
        return False
    parts = (choice.get(part) for part in ("delta", "message"))
    is_text = isinstance(choice.get("text"), str | None)
    return is_text and all(isinstance(part, dict | None) for part in parts) and _is_logprobs(choice.get("logprobs"))


def _is_logprobs(told: Any) -> bool:
    """As either endpoint tells them: entries under `content`, or lists side by side."""
    if not isinstance(told, dict | None):
        return False
    entries, *lists = ((told or {}).get(key) or [] for key in ("content", "tokens", "token_logprobs", "top_logprobs"))
    if not all(isinstance(part, list) for part in (entries, *lists)):
        return False
    tops = [entry.get("top_logprobs") or [] if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(top, list) and all(isinstance(t, dict) for t in top) for top in tops):
        return False
    return all(isinstance(top, dict | None) for top in lists[-1])


def _told(choice: dict[str, Any]) -> dict[str, Any]:
    """The delta or the message; empty for a completion, whose text is the choice's own."""
    return choice.get("delta") or choice.get("message") or {}


def _has_content(choice: dict[str, Any]) -> bool:
    said = any(value not in (None, "", []) for key, value in _told(choice).items() if key not in _NOT_CONTENT)
    return said or bool(choice.get("text"))


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """One for each token, in the form of a chat answer."""
    logprobs = choice.get("logprobs") or {}
    if logprobs.get("tokens") is None:
        return logprobs.get("content") or []
    tops = logprobs.get("top_logprobs") or []
    return [
        {"token": token, "logprob": logprob, "top_logprobs": _alternatives_of(top)}
        for token, logprob, top in zip_longest(logprobs["tokens"], logprobs.get("token_logprobs") or [], tops)
    ]


def _alternatives_of(top: dict[str, float] | None) -> list[dict[str, Any]]:
    return [{"token": token, "logprob": logprob} for token, logprob in (top or {}).items()]


def _token(entry: dict[str, Any]) -> Token:
    text = entry.get("token")
    top = tuple(logprob for _, logprob in _alternatives(entry))
    return Token(_number(entry.get("logprob")), top, text if isinstance(text, str) else None)


def _alternatives(entry: dict[str, Any]) -> list[tuple[str, float]]:
    told = entry.get("top_logprobs") or ()
    return [(str(t.get("token")), value) for t in told if (value := _number(t.get("logprob"))) is not None]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else None
