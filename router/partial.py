"""The start of an answer that one tier gave and a later one goes on with (`escalation: continue`).

The client sees one answer: what the first tier said, under the head of the answer that goes on with it, and then
the rest. What the next worker reads is text; its tokens are those that the first tier chose but where the text can
be cut into tokens in another way, and there the KV that can be taken over ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from router.events import AnswerEvent

_HEAD = ("id", "object", "created", "model", "system_fingerprint")


class Partial(NamedTuple):
    """Events without an end, their text, and the tokens that it cost."""

    events: tuple[AnswerEvent, ...]
    text: str
    tokens: int

    def under(self, head: AnswerEvent) -> list[AnswerEvent]:
        """The same events as if the worker of `head` had sent them."""
        told = {key: head.body[key] for key in _HEAD if key in head.body}
        return [AnswerEvent(json.dumps({**told, "choices": event.choices})) for event in self.events]


def begin(before: Partial | None, held: Sequence[AnswerEvent], limit: int | None) -> Partial | str:
    """What a tier said before it was left, after what it was given itself; or the reason why nobody can go on.

    `held` are its events so far, which are changed. `limit`: the most tokens of the whole answer.
    """
    if any(event.finishes() for event in held):
        return "the answer was complete"
    if any(event.has_other_than_text() for event in held):
        return "the answer was not plain text"
    first = before or Partial((), "", 0)
    shown = tuple(event for event in held if before is None or event.drop_role())
    text = first.text + "".join(event.text() for event in shown)
    tokens = first.tokens + sum(len(event.tokens()) for event in shown)
    if not text:
        return "nothing was said yet"
    if limit is not None and tokens >= limit:
        return "no token is left"
    return Partial((*first.events, *shown), text, tokens)
