"""Spans as lines of a file, for looking at a trace without a collector.

Router and workers may append to one file: a batch of spans is one write, which the kernel does not mix with others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from sglang_ext.errors import KVLiftError

logger = logging.getLogger(__name__)

SCHEME = "file:"
"""What an endpoint begins with that is a file: `file:/var/log/traces.jsonl`."""


class TraceFile(SpanExporter):
    """Appends each span as one line of JSON, in the form that OpenTelemetry's SDK gives it."""

    def __init__(self, path: Path) -> None:
        """Raises `KVLiftError` where the file cannot be opened for appending."""
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        except OSError as error:
            raise KVLiftError(
                f"traces cannot be written to {path}: {error.strerror}; name a file in a folder "
                "that exists and may be written to"
            ) from error
        self._path = path

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        lines = "".join(f"{span.to_json(indent=None)}\n" for span in spans)
        try:
            os.write(self._fd, lines.encode())
        except OSError as error:
            logger.error("%d spans lost: %s cannot be written: %s", len(spans), self._path, error.strerror)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
