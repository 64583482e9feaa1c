"""What requests may cost, and when a worker counts as unable to answer them."""

from __future__ import annotations

from pydantic import Field

from router.config.base import Seconds, Section


class Limits(Section):
    """What a request may cost. A streamed answer is bounded by first token and idle time, every one by the rest."""

    connect_s: Seconds = 2.0
    """To connect to a worker."""
    first_token_s: Seconds = 60.0
    """Of a streamed answer: from the call to the first content."""
    idle_s: Seconds = 30.0
    """Of a streamed answer: between two events after the first content."""
    attempt_s: Seconds = 120.0
    """Of an attempt that may still be discarded; the last tier's is not bounded by it."""
    total_s: Seconds = 600.0
    """Of the whole request, from the moment that it is served."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    """Of a request; a larger one is refused with 413, before it is read where its length is declared."""
    retries: int = Field(default=0, ge=0, le=10)
    """Per tier, after no connection, 429, 502 or 503. Another worker of the tier in place of one that cannot be
    connected to is no retry.
    """
    max_calls: int = Field(default=4, ge=1)
    """Chat calls to workers for one request, retries counted in."""
    max_shadow: int = Field(default=4, ge=1)
    """Shadow calls that run at once; what would be more is not asked."""
    max_in_flight: int = Field(default=1024, ge=1)
    """Requests that are served at once; the next ones wait, first come first served."""
    max_queue: int = Field(default=256, ge=0)
    """Requests that wait; what would be more is refused with 429 and a Retry-After."""
    queue_s: Seconds = 10.0
    """That a request waits at most, before it is refused in the same way."""

    def once(self) -> Limits:
        """The same without retries, for calls whose failure costs nobody an answer."""
        return self.model_copy(update={"retries": 0})


class Health(Section):
    """Probes of the workers, which say who is up. What calls meet is the breaker's matter."""

    interval_s: Seconds = 2.0
    """From the end of one probe to the next one."""
    timeout_s: Seconds = 5.0
    """Of one probe. Generous: a worker in a long prefill answers late and is not down."""
    misses: int = Field(default=3, ge=1)
    """Failed probes in a row that mark a worker down."""
    hits: int = Field(default=1, ge=1)
    """Good probes in a row that mark it up again; one is enough for a worker that was never up."""


class Breaker(Section):
    """When a worker that is up is not called, because its calls fail. Each worker has a breaker of its own."""

    failures: int = Field(default=5, ge=1)
    """Failed calls in a row that open it: no connection or a lost one, 5xx, an answer that is cut or malformed, a limit
    other than total_s. A 4xx never counts.
    """
    interval_s: Seconds = 5.0
    """While it is open, one call per interval tries the worker."""


class Restart(Section):
    """What `kvlift up` does when a worker dies."""

    attempts: int = Field(default=5, ge=0)
    """For one worker, over the life of `kvlift up`; what dies once more ends it."""
    backoff_s: Seconds = 1.0
    """Before the first restart. Each next pause is twice as long, up to 30 s."""
    stop_s: Seconds = 10.0
    """From asking a worker to stop to killing it."""
