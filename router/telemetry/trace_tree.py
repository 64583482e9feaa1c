"""A trace out of a file of spans, as a tree with durations.

The file is what `telemetry.traces.file` and a worker's `--otlp-traces-endpoint file:PATH` write: the JSON of
OpenTelemetry's SDK, one span a line, in the order in which the spans ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError
from rich.text import Text
from rich.tree import Tree

from sglang_ext.errors import KVLiftError

_MANY = 4  # siblings of one name, without children of their own, from which on they share a line
_SHOWN = ("kvlift.", "gen_ai.usage.")
_PHASE = "kvlift.ms."


class TraceError(KVLiftError):
    """A file that cannot be read, or that does not hold the trace."""


class _Context(BaseModel):
    trace_id: str
    span_id: str


class _Status(BaseModel):
    status_code: str
    description: str | None = None


class _Resource(BaseModel):
    attributes: dict[str, Any] = {}


class Span(BaseModel):
    """One line of the file; keys that are not listed here are ignored."""

    name: str
    context: _Context
    parent_id: str | None
    start_time: datetime
    end_time: datetime
    status: _Status
    attributes: dict[str, Any] = {}
    resource: _Resource = _Resource()

    @property
    def title(self) -> str:
        """The name; SGLang's own for threads without the host and pid that follow."""
        return self.name.partition("(host:")[0].strip()

    @property
    def ms(self) -> float:
        return (self.end_time - self.start_time).total_seconds() * 1e3

    @property
    def service(self) -> str:
        return str(self.resource.attributes.get("service.name", "?"))


class Traces(NamedTuple):
    """The traces of a file by their id, that of the latest span last; `skipped` counts lines that are no spans."""

    spans: dict[str, list[Span]]
    skipped: int

    def find(self, start: str | None) -> tuple[str, list[Span]]:
        """The one whose id begins with `start`, or the latest. Raises `TraceError`."""
        if not self.spans:
            raise TraceError(f"no span in the file ({self.skipped} lines that are none)")
        if start is None:
            return next(reversed(self.spans.items()))
        found = [pair for pair in self.spans.items() if pair[0].startswith(start.removeprefix("0x").lower())]
        if len(found) != 1:
            latest = ", ".join(list(self.spans)[-5:])
            raise TraceError(f"{len(found)} traces begin with {start!r}; name one, the latest are {latest}")
        return found[0]


def read(path: Path) -> Traces:
    """Raises `TraceError`."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror}") from error
    spans: dict[str, list[Span]] = {}
    skipped = 0
    for line in lines:
        try:
            span = Span.model_validate_json(line)
        except ValidationError:
            skipped += bool(line.strip())
            continue
        trace_id = span.context.trace_id.removeprefix("0x")
        trace = spans.pop(trace_id, [])  # put back at the end
        trace.append(span)
        spans[trace_id] = trace
    return Traces(spans, skipped)


def tree(trace_id: str, spans: Iterable[Span]) -> Tree:
    """The spans below those whose parent is not in the file: a client's, or none."""
    by_parent: dict[str | None, list[Span]] = {}
    known = {span.context.span_id for span in spans}
    for span in sorted(spans, key=lambda span: span.start_time):
        by_parent.setdefault(span.parent_id if span.parent_id in known else None, []).append(span)
    began = min(span.start_time for span in spans)
    top = Tree(Text.assemble("trace ", (trace_id, "bold"), f", {len(known)} spans; duration, and start from its begin"))
    _grow(top, None, by_parent, began)
    return top


def _grow(node: Tree, parent: str | None, by_parent: dict[str | None, list[Span]], began: datetime) -> None:
    for group in _grouped(by_parent.get(parent, ()), by_parent):
        branch = node.add(_line(group, group[0].context.span_id in by_parent, began))
        if len(group) == 1:
            _grow(branch, group[0].context.span_id, by_parent, began)


def _grouped(spans: Iterable[Span], by_parent: dict[str | None, list[Span]]) -> Iterator[list[Span]]:
    def kind(span: Span) -> tuple[str, bool]:
        return span.name, span.context.span_id in by_parent

    for (_, has_children), run in groupby(spans, kind):
        group = list(run)
        if has_children or len(group) < _MANY:
            yield from ([span] for span in group)
        else:
            yield group


def _line(group: list[Span], has_children: bool, began: datetime) -> Text:
    first = group[0]
    total = sum(span.ms for span in group)
    after = (first.start_time - began).total_seconds() * 1e3
    name = first.title if len(group) == 1 else f"{first.title} x {len(group)}"
    line = Text.assemble((name, "bold"), "  ", (f"{total:,.1f} ms", "cyan"), "  ", (f"+{after:,.1f}", "dim"))
    line.append(f"  {first.service}", "magenta")
    if any(span.status.status_code == "ERROR" for span in group):
        line.append(f"  failed: {first.status.description or '?'}", "red")
    if len(group) == 1:
        line.append(_told(first, has_children), "dim")
    return line


def _told(span: Span, has_children: bool) -> str:
    """Attributes of the router and of tokens; phases only where no span below tells them."""
    words = [""]
    for key, value in span.attributes.items():
        if key.startswith(_SHOWN) and not (has_children and key.startswith(_PHASE)):
            name = key.removeprefix("kvlift.").removeprefix("gen_ai.usage.")
            words.append(f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}")
    return "  ".join(words)
