"""Workers' spans join the trace of whoever calls: SGLang's own, and those of the lift. Numbers are of the case list."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from router.app import create_app
from router.config import Config
from router.telemetry.trace_tree import Span, read
from sglang_ext.errors import KVLiftError
from sglang_ext.trace_file import TraceFile
from sglang_ext.worker import spans
from tests.router.fake_worker import serving, until
from tests.worker.conftest import Fleet

PARENT = "b7ad6b7169203331"


def call(trace: str) -> dict[str, str]:
    """The headers of a call in a trace."""
    return {"traceparent": f"00-{trace}-{PARENT}-01"}


def found(file: Path, trace: str, *names: str) -> list[Span]:
    """The spans of a trace, once spans of all these names are there; names are regular expressions."""

    def there() -> bool:
        got = read(file).spans.get(trace, []) if file.exists() else []
        return all(any(re.fullmatch(name, span.name) for span in got) for name in names)

    until(there, 30)
    return read(file).spans[trace]


def one(got: list[Span], name: str) -> Span:
    (span,) = [span for span in got if span.name == name]
    return span


def test_an_endpoint_may_be_a_file_or_http_or_what_sglang_takes(tmp_path):
    assert isinstance(spans.exporter_for(str, f"file:{tmp_path}/t"), TraceFile)
    assert type(spans.exporter_for(str, "http://h:4318/v1/traces")).__module__.startswith(
        "opentelemetry.exporter.otlp.proto.http"
    )
    assert spans.exporter_for(lambda endpoint: ("sglang's", endpoint), "h:4317") == ("sglang's", "h:4317")


def test_a_file_that_cannot_be_opened_is_a_clear_error(tmp_path):
    with pytest.raises(KVLiftError, match="name a file in a folder"):
        TraceFile(tmp_path)


def test_writers_of_one_file_do_not_mix_their_lines(tmp_path):
    class Line:
        def __init__(self, text: str) -> None:
            self.text = text

        def to_json(self, indent: None) -> str:
            return self.text

    file = tmp_path / "t"
    writers = [TraceFile(file), TraceFile(file)]
    for number in range(50):
        for name, writer in zip("ab", writers, strict=True):
            writer.export([Line(f"{name}{number}" * 500)])
    for writer in writers:
        writer.shutdown()
    lines = file.read_text().splitlines()
    assert len(lines) == 100 and all(set(line) <= set(f"{line[0]}0123456789") for line in lines)


def test_case_65_a_lift_and_what_it_asks_of_the_source_are_one_trace(fleet: Fleet, prompt):
    trace = "11" * 16
    ids = prompt(60)
    fleet.small.generate(ids, tokens=1)
    body = {"input_ids": ids, "source": {"url": fleet.small.url}, "pack": "tiny-small-to-large", "when": "always"}
    answer = fleet.large.client.post("/kv/lift", json=body, headers=call(trace)).json()
    assert answer["status"] == "applied"
    got = found(fleet.traces, trace, "POST /kv/lift", "POST /kv/export")
    lift, export = one(got, "POST /kv/lift"), one(got, "POST /kv/export")
    assert (lift.parent_id, lift.service) == (f"0x{PARENT}", "kvlift-large")
    assert (export.parent_id, export.service) == (lift.context.span_id, "kvlift-small")
    phases = {span.name: span for span in got if span.name.startswith("lift: ")}
    assert set(phases) == {f"lift: {name}" for name in answer["ms"] if name != "total"}
    for name, span in phases.items():
        assert span.parent_id == lift.context.span_id
        assert span.ms == pytest.approx(answer["ms"][name.removeprefix("lift: ")], abs=0.01)


def test_a_call_without_a_trace_makes_no_span_of_ours(fleet: Fleet, prompt):
    before = len([s for got in read(fleet.traces).spans.values() for s in got if s.name.startswith("GET /kv")])
    fleet.large.client.get("/kv/counters")
    fleet.large.client.get("/kv/counters", headers=call("22" * 16))
    found(fleet.traces, "22" * 16, "GET /kv/counters")
    after = len([s for got in read(fleet.traces).spans.values() for s in got if s.name.startswith("GET /kv")])
    assert after == before + 1


@pytest.fixture
def router(fleet: Fleet) -> Iterator[str]:
    tiers = [{"name": n, "served": f"{n}-served", "address": getattr(fleet, n).url} for n in ("small", "large")]
    lift = {"pairs": [{"source": "small", "target": "large", "pack": "tiny-small-to-large"}], "when": "always"}
    config = {"tiers": tiers, "lift": {**lift, "timeout_s": 60}, "policies": {"always": {"method": "always"}}}
    traces = {"traces": {"file": str(fleet.traces)}}
    app = create_app(Config.model_validate({**config, "default_policy": "always", "telemetry": traces}))
    with serving(app) as address:
        until(app.state.gateway.monitor.all_up)
        yield address


def test_case_65_one_trace_from_the_client_through_the_router_into_both_workers(fleet: Fleet, router: str):
    trace = "33" * 16
    body = {"model": "kvlift", "messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 4}
    answer = httpx.post(f"{router}/v1/chat/completions", json=body, headers=call(trace), timeout=120)
    assert answer.headers["x-kvlift-lift"] == "applied", answer.text
    root, large = "POST /v1/chat/completions", "attempt large"
    got = found(
        fleet.traces, trace, root, large, "POST /kv/lift", "POST /kv/export", "lift: recompute", "attempt small"
    )

    def sglang(service: str) -> list[Span]:
        return [s for s in found(fleet.traces, trace) if s.service == service and s.title.startswith("Req ")]

    until(lambda: sglang("kvlift-large") and sglang("kvlift-small"), 30)
    assert one(got, root).parent_id == f"0x{PARENT}"
    assert one(got, "POST /kv/lift").parent_id == one(got, "lift small to large").context.span_id
    assert {s.parent_id for s in sglang("kvlift-large")} == {one(got, large).context.span_id}
    assert {s.parent_id for s in sglang("kvlift-small")} == {one(got, "attempt small").context.span_id}
