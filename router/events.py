"""One event of a worker's answer, and what it means.

A streamed answer is many events; a buffered one is a single event that holds a message where the others hold
deltas. Whoever reads an answer need not know which.
"""

from __future__ import annotations

import json
import math
from typing import Any

from policies import Token

_NOT_CONTENT = frozenset({"role"})


class Malformed(Exception):
    """What came is not an event of a chat answer."""


class ChatEvent:
    """One event. `raw` is the worker's own text, `body` what it parses to."""

    __slots__ = ("body", "choices", "raw")

    def __init__(self, raw: str) -> None:
        """Raises `Malformed`."""
        self.raw = raw
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
        parts = ((choice.get("delta") or choice.get("message") or {}).get("content") for choice in self.choices)
        return "".join(part for part in parts if isinstance(part, str))

    def tool_calls(self) -> list[tuple[int, dict[str, Any]]]:
        """Calls, or pieces of them, each with the index of the call in the answer.

        In a message a call's index is its place: some workers write there which of the tools it is.
        """
        calls: list[tuple[int, dict[str, Any]]] = []
        for choice in self.choices:
            pieces = (choice.get("delta") or choice.get("message") or {}).get("tool_calls")
            for place, piece in enumerate(pieces if isinstance(pieces, list) else []):
                function = piece.get("function") if isinstance(piece, dict) else None
                if isinstance(function, dict):
                    told = piece.get("index") if choice.get("delta") else None
                    calls.append((told if type(told) is int else place, function))
        return calls

    def first_alternatives(self) -> list[tuple[str, float]]:
        """Text and log-probability of the likeliest first tokens of this event; empty where it tells none."""
        return next((_alternatives(entry) for choice in self.choices for entry in _entries(choice)), [])

    def show_logprobs(self, top: int | None) -> bool:
        """Leaves `top` alternatives per token in the body, None: no log-probabilities. True where that changed it."""
        changed = False
        for choice in self.choices:
            logprobs = choice.get("logprobs")
            if not logprobs:
                continue
            if top is None:
                choice["logprobs"] = None
                changed = True
                continue
            for entry in logprobs.get("content") or []:
                if len(entry.get("top_logprobs") or ()) > top:
                    entry["top_logprobs"] = entry["top_logprobs"][:top]
                    changed = True
        return changed


def _is_choice(choice: Any) -> bool:
    parts = ("delta", "message", "logprobs")
    return isinstance(choice, dict) and all(isinstance(choice.get(part), dict | None) for part in parts)


def _has_content(choice: dict[str, Any]) -> bool:
    said = choice.get("delta") or choice.get("message") or {}
    return any(value not in (None, "", []) for key, value in said.items() if key not in _NOT_CONTENT)


def _entries(choice: dict[str, Any]) -> list[dict[str, Any]]:
    return (choice.get("logprobs") or {}).get("content") or []


def _token(entry: dict[str, Any]) -> Token:
    text = entry.get("token")
    top = tuple(logprob for _, logprob in _alternatives(entry))
    return Token(_number(entry.get("logprob")), top, text if isinstance(text, str) else None)


def _alternatives(entry: dict[str, Any]) -> list[tuple[str, float]]:
    told = entry.get("top_logprobs") or ()
    return [(str(t.get("token")), value) for t in told if (value := _number(t.get("logprob"))) is not None]


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not math.isnan(value) else None
