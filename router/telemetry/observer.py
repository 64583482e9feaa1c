"""Follows each request from its first byte to its last, and tells metrics, spans, log and page of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.trace import Span
from starlette.datastructures import Headers
from starlette.types import Scope

from router.config import Telemetry
from router.errors import ApiError
from router.record import Record
from router.telemetry import logs
from router.telemetry.attributes import describe_request
from router.telemetry.decisions import Decisions, summary
from router.telemetry.metrics import Metrics
from router.telemetry.standing import Standing
from router.telemetry.tracing import Tracing

log = logging.getLogger(__name__)


class Observer:
    """The eyes of one router. `aclose` writes the spans that are not written yet."""

    def __init__(self, settings: Telemetry, readiness: Callable[[], dict[str, Any]]) -> None:
        """`readiness` is asked when metrics are. Raises `ConfigError` where spans cannot go where they should."""
        self.metrics = Metrics(Standing(readiness))
        self.decisions = Decisions(settings.decisions)
        self._tracing = Tracing(settings.traces)

    @contextmanager
    def watching(self, scope: Scope, record: Record) -> Iterator[None]:
        """Around all that is done for one request. What has not ended by then was given up by its client."""
        name = f"{scope['method']} {scope['path']}"
        with logs.about(record.id), self._tracing.serving(name, Headers(scope=scope)) as span:
            try:
                yield
            except Exception:
                record.end("failed")
                raise
            finally:
                record.end("cancelled")
                self._tell(record, span)

    def refused(self, error: ApiError) -> None:
        """A request was not taken: it has no record."""
        self.metrics.failed(error.code)
        log.info("request: not taken: reason=%s", error.code, extra={logs.FIELDS: {"reason": error.code}})

    async def aclose(self) -> None:
        await asyncio.to_thread(self._tracing.close)

    def _tell(self, record: Record, span: Span) -> None:
        self.metrics.observe(record)
        self.decisions.add(record)
        describe_request(span, record)
        told = summary(record)
        del told["at"]  # the line has its own time
        line = " ".join(f"{key}={value}" for key, value in told.items() if key != "ms")
        log.info("request: %s ms=%.1f", line, record.total_ms, extra={logs.FIELDS: told})
