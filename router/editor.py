"""Makes a worker's events the client's.

Rewrites, and no others: log-probabilities that only the router asked for are left out; a usage chunk is sent exactly
when the client asked for one; the extension field `kvlift` is added to the last event; an answer that goes on with
another's is told as one, under one head. Every other event of a streamed answer leaves as the worker sent it.
"""

from __future__ import annotations

from router.events import AnswerEvent
from router.partial import Partial
from router.record import Record
from router.request import Request
from router.sse import DONE, encode


class Editor:
    """Of one answer, streamed or not. The last event waits for the usage, which comes after it."""

    def __init__(self, request: Request, record: Record, partial: Partial | None) -> None:
        """`partial`: what another worker said first."""
        self._request = request
        self._record = record
        self._partial = partial
        self._begun = False
        self._last: AnswerEvent | None = None  # the newest event with a finish_reason
        self._usage: AnswerEvent | None = None

    def feed(self, event: AnswerEvent) -> bytes:
        """What may be sent now; possibly nothing."""
        if event.is_usage_only:
            self._usage = event
            return b""
        sent = self._before(event)
        if self._partial is not None and not event.drop_role():
            return sent
        sent += self._shown(self._last)
        self._last = event if event.finishes() else None
        return sent if event.finishes() else sent + self._shown(event)

    def end(self) -> bytes:
        """The last events of a complete stream."""
        if not self._request.wants_usage or self._usage is None:
            return self._extended(self._last) + encode(DONE)
        return self._shown(self._last) + self._extended(self._usage) + encode(DONE)

    def whole(self, event: AnswerEvent) -> bytes:
        """A buffered answer."""
        return self._with_record(event).encode()

    def _before(self, event: AnswerEvent) -> bytes:
        """What comes before the first event of this worker."""
        if self._begun or self._partial is None:
            return b""
        self._begun = True
        return b"".join([self._shown(earlier) for earlier in self._partial.under(event)])

    def _shown(self, event: AnswerEvent | None) -> bytes:
        if event is None:
            return b""
        event.show_logprobs(self._request.top_logprobs)
        return encode(event.data)

    def _extended(self, event: AnswerEvent | None) -> bytes:
        return b"" if event is None else encode(self._with_record(event))

    def _with_record(self, event: AnswerEvent) -> str:
        event.show_logprobs(self._request.top_logprobs)
        event.add("kvlift", self._record.as_json())
        return event.data
