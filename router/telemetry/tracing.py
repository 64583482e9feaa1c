"""Spans of one request: from the client's `traceparent` to every call of a worker.

With tracing off nothing is recorded and OpenTelemetry's SDK is not imported; the client's context still goes on to the
workers, as W3C asks of a service that does not take part. Spans hold names, counts and times, never text of a request,
and never the message of an exception, which may quote one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import context, trace
from opentelemetry.trace import NoOpTracer, Span, SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.config.telemetry import Traces
from router.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

SERVICE = "kvlift-router"

_TRACER = context.create_key("kvlift.tracer")
_W3C = TraceContextTextMapPropagator()


class Tracing:
    """Where the spans of one router go. `close` writes what is not written yet."""

    def __init__(self, settings: Traces | None) -> None:
        """Raises `ConfigError` where the destination cannot be used."""
        self._provider = None if settings is None else _provider(settings)
        self._tracer: Tracer = NoOpTracer() if self._provider is None else self._provider.get_tracer("kvlift")

    @contextmanager
    def serving(self, name: str, headers: Mapping[str, str]) -> Iterator[Span]:
        """The span of a client's request, current inside the block.

        Its parent is the client's, if `headers` hold a valid `traceparent`; else it is the root of a new trace.
        """
        token = context.attach(context.set_value(_TRACER, self._tracer, _W3C.extract(headers, context.Context())))
        try:
            with _quietly(self._tracer.start_span(name, kind=SpanKind.SERVER), end_on_exit=True) as span:
                yield span
        finally:
            context.detach(token)

    def close(self) -> None:
        """Blocks for as long as a collector takes, at most the exporter's own limit."""
        if self._provider is not None:
            self._provider.shutdown()


def begin(name: str, kind: SpanKind = SpanKind.INTERNAL) -> Span:
    """A span below the current one, which stays the current one. The caller ends it."""
    tracer = context.get_value(_TRACER)
    return (tracer if isinstance(tracer, Tracer) else NoOpTracer()).start_span(name, kind=kind)


def within(span: Span) -> AbstractContextManager[Span]:
    """Makes a span the current one inside the block, and leaves it open."""
    return _quietly(span, end_on_exit=False)


def during(span: Span) -> AbstractContextManager[Span]:
    """Makes a span the current one inside the block, and ends it there."""
    return _quietly(span, end_on_exit=True)


def inject(headers: Any) -> None:
    """Writes `traceparent` and `tracestate` of the current span into a mapping of headers, if there is one."""
    _W3C.inject(headers)


def trace_id() -> str | None:
    """Of the current span, 32 hexadecimal digits."""
    told = trace.get_current_span().get_span_context()
    return trace.format_trace_id(told.trace_id) if told.is_valid else None


def _quietly(span: Span, *, end_on_exit: bool) -> AbstractContextManager[Span]:
    return trace.use_span(span, end_on_exit, record_exception=False, set_status_on_exception=False)


def _provider(settings: Traces) -> TracerProvider:
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    provider = TracerProvider(
        resource=Resource.create({SERVICE_NAME: SERVICE}), sampler=ParentBased(TraceIdRatioBased(settings.sample))
    )
    provider.add_span_processor(BatchSpanProcessor(_exporter(settings), schedule_delay_millis=1000))
    return provider


def _exporter(settings: Traces) -> Any:
    if settings.file is None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=settings.endpoint)
    from sglang_ext.errors import KVLiftError
    from sglang_ext.trace_file import TraceFile

    try:
        return TraceFile(settings.file)
    except KVLiftError as error:
        raise ConfigError(f"telemetry.traces.file: {error}") from error
