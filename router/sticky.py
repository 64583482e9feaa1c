"""A conversation that has left its first tier stays where it went: there its prefix is in the cache.

What is known of it is one seat per answer, found by the messages up to that answer. A conversation is told by what
was said, so white space around an answer, ids of tool calls and reasoning, which clients write back in their own
way or not at all, are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from policies import Finish
from router.chat import said
from router.conversation import Conversation, Recall
from router.request import Request


class Seat(NamedTuple):
    """Where a conversation was answered; `namespace` is that of its lifted KV, None for native KV."""

    tier: str
    namespace: str | None


class Sticky:
    """The seats that were taken in the last `seconds`; 0: none. At most 10,000, those of the latest conversations."""

    def __init__(self, seconds: float) -> None:
        self._seats: Recall[Seat] = Recall(seconds)

    def find(self, request: Request, route: str) -> Seat | None:
        """The seat of the conversation that the request goes on with, None where it begins one."""
        messages = request.messages()
        answers = [place for place, message in enumerate(messages) if _role(message) == "assistant"]
        return self._seats.find(_turns(request, route, messages[: answers[-1] + 1])) if answers else None

    def take(self, request: Request, route: str, answer: Finish, seat: Seat) -> None:
        """Notes where `answer` was given."""
        if messages := request.messages():
            self._seats.note(_turns(request, route, [*messages, said(answer)]), seat)


def _turns(request: Request, route: str, messages: Sequence[Any]) -> Conversation:
    """KV of another tenant, policy or way to lift is another conversation's."""
    wish = request.options.model_dump_json(include={"rho", "coverage", "selector", "lift"})
    body: Mapping[str, Any] = {**request.body, "messages": [_spoken(message) for message in messages]}
    return Conversation(body, route, wish)


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _spoken(message: Any) -> Any:
    if not isinstance(message, dict):
        return message
    content, calls = message.get("content"), message.get("tool_calls") or []
    return {
        "role": message.get("role"),
        "content": content.strip() if isinstance(content, str) else content or "",
        "tool_calls": [_called(call) for call in calls] if isinstance(calls, list) else calls,
    }


def _called(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    return [function.get("name"), function.get("arguments")] if isinstance(function, dict) else call
