"""Lines of a log, as text or as JSON objects.

Messages are made of names, counts and the router's own words. An exception that nobody expected is told by its type and
the lines of code it went through: its message may quote a request, so it stays out.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

from router.telemetry import tracing

_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)

FIELDS = "kvlift"
"""The key of `extra` under which a log call may give fields of its own."""

_ExcInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


@contextmanager
def about(request_id: str) -> Iterator[None]:
    """What is logged inside the block, and in tasks that begin there, is about this request."""
    token = _request_id.set(request_id)
    try:
        yield
    finally:
        _request_id.reset(token)


class TextFormatter(logging.Formatter):
    """logging's own lines, less the messages of exceptions."""

    def formatException(self, ei: _ExcInfo) -> str:
        error = ei[1]
        return "" if error is None else "".join(_way(error)).rstrip()


class JsonFormatter(TextFormatter):
    """One object a line: time, level, logger, message, ids of request and trace, and the call's own fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": _request_id.get(),
            "trace_id": tracing.trace_id(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in line.items() if value is not None})


def _way(error: BaseException) -> Iterator[str]:
    yield from traceback.format_tb(error.__traceback__)
    yield f"{type(error).__module__}.{type(error).__qualname__}\n"
    if (earlier := error.__cause__ or error.__context__) is not None:
        yield "after:\n"
        yield from _way(earlier)
