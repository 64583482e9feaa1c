"""Spans of the /kv routes, in the trace of whoever called.

They go where SGLang's own go (`--enable-trace --otlp-traces-endpoint ENDPOINT`); without that nothing is recorded and
the caller's context still reaches the source worker. Beside the host and port of a gRPC collector, which SGLang knows,
ENDPOINT may be an address that ends in `/v1/traces` (OTLP over HTTP) or `file:PATH` (one JSON object a line).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import time_ns
from typing import Any

from fastapi import Request
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from sglang_ext.trace_file import SCHEME, TraceFile

_TOTAL = "total"
_HTTP_PATH = "/v1/traces"
_W3C = TraceContextTextMapPropagator()


def serving(request: Request) -> AbstractContextManager[Any]:
    """The span of one call, current inside the block; none where the caller sent no valid `traceparent`."""
    parent = _W3C.extract(request.headers, Context())
    if not trace.get_current_span(parent).get_span_context().is_valid:
        return nullcontext()
    span = _tracer().start_span(f"{request.method} {request.url.path}", parent, SpanKind.SERVER)
    return trace.use_span(span, end_on_exit=True, record_exception=False)


def headers() -> dict[str, str]:
    """What carries the current span into another worker."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier


def phases(ms: Mapping[str, float]) -> None:
    """One span per phase, below the current one, end to end and ending now: `ms` tells durations, not moments."""
    if not trace.get_current_span().is_recording():
        return
    steps = [(name, int(duration * 1e6)) for name, duration in ms.items() if name != _TOTAL]
    at = time_ns() - sum(duration for _, duration in steps)
    for name, duration in steps:
        span = _tracer().start_span(f"lift: {name}", start_time=at)
        at += duration
        span.end(at)


def exporter_for(original: Callable[[str], Any], endpoint: str) -> Any:
    """AROUND hook for SGLang's choice of an exporter."""
    if endpoint.startswith(SCHEME):
        return TraceFile(Path(endpoint.removeprefix(SCHEME)))
    if endpoint.endswith(_HTTP_PATH):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=endpoint)
    return original(endpoint)


def _tracer() -> trace.Tracer:
    return trace.get_tracer("kvlift")
