"""Which conversation a request belongs to, told from its messages alone.

A chat API has no name for a conversation: each turn brings all messages so far. So a turn is known by the digest of
its messages, and the next turn by having that digest among its prefixes. Whatever else shapes the prompt, and whoever
may share a cache with it, is folded in, so that no two tenants ever share a conversation.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from sglang_ext.identity import digest_fields

Value = TypeVar("Value")

_FOLDED = ("cache_salt", "tools", "chat_template_kwargs", "lora_path")
_REMEMBERED = 10_000  # conversations; a digest and a reference each, a few megabytes together


class Conversation:
    """The prefixes of one request's messages; `digests` has one per prefix, shortest first."""

    __slots__ = ("digests",)

    def __init__(self, body: Mapping[str, Any], *also: str) -> None:
        """`body` is a chat request with its salt; `also` is folded in too. A body without messages has no prefix."""
        messages = body.get("messages")
        digest = digest_fields([*also, *(_canonical(body.get(key)) for key in _FOLDED)])
        self.digests: list[str] = []
        for message in messages if isinstance(messages, list) else []:
            digest = digest_fields([digest, _canonical(message)])
            self.digests.append(digest)


class Recall(Generic[Value]):
    """What was noted about the latest conversations; the one that was used longest ago is forgotten first."""

    def __init__(self, seconds: float, size: int = _REMEMBERED, clock: Callable[[], float] = time.monotonic) -> None:
        """A note lives for `seconds` after it was written last."""
        self._seconds = seconds
        self._size = size
        self._clock = clock
        self._notes: OrderedDict[str, tuple[float, Value]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._notes)

    def find(self, conversation: Conversation) -> Value | None:
        """What was noted at the longest prefix of the conversation."""
        for digest in reversed(conversation.digests):
            if (note := self._notes.get(digest)) is None:
                continue
            ends_at, value = note
            if self._clock() < ends_at:
                self._notes.move_to_end(digest)
                return value
            del self._notes[digest]
        return None

    def note(self, conversation: Conversation, value: Value) -> None:
        """Notes `value` for this turn of the conversation and those that follow it."""
        if not conversation.digests:
            return
        digest = conversation.digests[-1]
        self._notes[digest] = self._clock() + self._seconds, value
        self._notes.move_to_end(digest)
        if len(self._notes) > self._size:
            self._notes.popitem(last=False)


def _canonical(value: Any) -> str:
    """Equal for equal JSON values; ASCII, so that a lone surrogate of a client does no harm."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
