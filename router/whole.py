"""A complete answer, put together from its events, streamed or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from policies import Finish, ToolCall
from router.events import AnswerEvent


@dataclass(slots=True)
class _Call:
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class Whole:
    """What one answer has said so far. Reasoning is no part of it."""

    _text: list[str] = field(default_factory=list)
    _calls: dict[Any, _Call] = field(default_factory=dict)  # by the index that their pieces name

    def add(self, event: AnswerEvent) -> None:
        """The next event. Pieces of one call share its index; a message holds each call whole, in order."""
        self._text.append(event.text())
        for index, function in event.tool_calls():
            call = self._calls.setdefault(index, _Call())
            call.name += _string(function.get("name"))
            call.arguments += _string(function.get("arguments"))

    @property
    def text(self) -> str:
        return "".join(self._text)

    def finish(self, reason: str) -> Finish:
        """The end of the answer, for `reason`; it is complete now."""
        calls = tuple(ToolCall(call.name, call.arguments) for call in self._calls.values())
        return Finish(reason, self.text, calls)


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
