"""The config's section `telemetry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from router.config.base import Section


class Traces(Section):
    """Where spans go: to a collector (OTLP over HTTP), or into a file, one JSON object a line.

    `kvlift up` starts its workers with the same destination, so that SGLang's own spans join.
    """

    endpoint: str | None = None
    """Of a collector, with its path: http://HOST:4318/v1/traces."""
    file: Path | None = None
    """To append to, in place of a collector; relative to where the command is run."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests; a client's own choice comes before it."""

    @field_validator("endpoint")
    @classmethod
    def _is_a_url(cls, endpoint: str | None) -> str | None:
        if endpoint is None:
            return None
        try:
            parts = urlsplit(endpoint)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            whole = False
        if not whole or any(c.isspace() for c in endpoint):
            raise ValueError(f"{endpoint!r} is no address of a collector; write http://HOST:4318/v1/traces")
        return endpoint

    @model_validator(mode="after")
    def _one_destination(self) -> Traces:
        if (self.endpoint is None) == (self.file is None):
            raise ValueError("give either 'endpoint' (a collector) or 'file'")
        return self

    def worker_arguments(self, worker: str) -> list[str]:
        """What a worker's command line says so that SGLang's spans, and the lift's, join the router's."""
        where = self.endpoint or f"file:{(self.file or Path()).absolute()}"
        return ["--enable-trace", "--otlp-traces-endpoint", where, "--otlp-service-name", f"kvlift-{worker}"]


class Telemetry(Section):
    """Metrics are always at `/metrics`. Neither spans nor logs hold prompt text or keys."""

    traces: Traces | None = None
    """Where spans go. Unset: none are recorded, and a client's `traceparent` goes on to the workers."""
    logs: Literal["text", "json"] = "text"
    """How the router's log lines are written."""
    decisions: int = Field(default=50, ge=0, le=1000)
    """Of the last requests, shown at `/` and `/status`."""
