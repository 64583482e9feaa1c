"""One trace from the client to both workers. Numbers are those of the case list."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from fastapi import FastAPI, Request

from router.config import Config, Traces, load_config
from router.errors import ConfigError
from router.telemetry.trace_tree import Span, read
from router.telemetry.tracing import Tracing
from tests.router.conftest import MESSAGES
from tests.router.fake_worker import UNSURE, applied, serving, until
from tests.router.test_disconnect import hang_up

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, UNSAMPLED = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "traces.jsonl"


@pytest.fixture
def traced(build, file):
    """A house whose spans go to `file`; its small worker is not sure, and its large one lifts."""
    house = build(telemetry={"traces": {"file": str(file)}})
    house.small.script.logprob = UNSURE
    house.large.script.lift = applied()
    return house


def spans_of(file: Path, count: int) -> dict[str, Span]:
    """The spans of the only trace of a file by their name, once there are `count` of them."""
    until(lambda: sum(map(len, read(file).spans.values())) >= count)
    (spans,) = read(file).spans.values()
    assert len(spans) == count
    return {span.name: span for span in spans}


def told(worker, path: str) -> list[list[str]]:
    """The parts of each `traceparent` that a worker was sent with a call."""
    return [headers["traceparent"].split("-") for asked, headers in worker.headers if asked == path]


def ask(house, stream: bool = False, traceparent: str | None = SAMPLED, **fields):
    headers = {} if traceparent is None else {"traceparent": traceparent}
    body = {"model": "kvlift", "messages": MESSAGES, "stream": stream, **fields}
    return house.http.post("/v1/chat/completions", json=body, headers=headers)


def test_case_65_the_clients_trace_reaches_both_workers(traced, file, stream):
    assert ask(traced, stream).headers["x-kvlift-lift"] == "applied"
    spans = spans_of(file, 4)
    root, small, lift, large = (
        spans[n] for n in ("POST /v1/chat/completions", "attempt small", "lift small to large", "attempt large")
    )
    assert root.parent_id == f"0x{PARENT}"
    assert {span.context.trace_id for span in spans.values()} == {f"0x{TRACE}"}
    assert {small.parent_id, lift.parent_id, large.parent_id} == {root.context.span_id}
    for worker, path, span in (
        (traced.small, "/v1/chat/completions", small),
        (traced.large, "/kv/lift", lift),
        (traced.large, "/v1/chat/completions", large),
    ):
        assert told(worker, path) == [["00", TRACE, span.context.span_id.removeprefix("0x"), "01"]]


def test_spans_say_what_was_decided_and_why(traced, file, stream):
    ask(traced, stream)
    spans = spans_of(file, 4)
    root, small, lift = (
        spans[n].attributes for n in ("POST /v1/chat/completions", "attempt small", "lift small to large")
    )
    assert (small["kvlift.outcome"], small["kvlift.reason"]) == ("discarded", "low_confidence")
    assert small["kvlift.confidence"] == UNSURE
    assert (lift["kvlift.status"], lift["kvlift.tokens.recomputed"], lift["kvlift.ms.map"]) == ("applied", 4, 1.0)
    assert (root["kvlift.tier"], root["kvlift.path"], root["kvlift.outcome"]) == ("large", "lifted", "answered")
    assert root["kvlift.escalations"] == "low_confidence"
    assert spans["attempt large"].attributes["gen_ai.usage.output_tokens"] == 3
    assert all(span.start_time >= spans["POST /v1/chat/completions"].start_time for span in spans.values())


@pytest.mark.parametrize(
    "malformed",
    [None, "", "garbage", "00-" + "0" * 32 + f"-{PARENT}-01", f"00-{TRACE}-xyz-01", f"ff-{TRACE}-{PARENT}-01", "00-é"],
)
def test_case_65_a_malformed_traceparent_begins_a_new_trace(traced, file, malformed):
    raw = None if malformed is None else malformed.encode()
    assert ask(traced, traceparent=raw).status_code == 200
    spans = spans_of(file, 4)
    root = spans["POST /v1/chat/completions"]
    assert root.parent_id is None
    assert root.context.trace_id != f"0x{TRACE}"
    assert {parts[1] for parts in told(traced.small, "/v1/chat/completions")} == {root.context.trace_id[2:]}


def test_a_request_that_is_given_up_leaves_no_span_open(traced, file):
    traced.small.script.fault_after, traced.small.script.fault = 1, "stall"
    hang_up(traced, lambda: traced.small.running == 1, stream=True)
    spans = spans_of(file, 2)
    assert {span.attributes["kvlift.outcome"] for span in spans.values()} == {"cancelled"}


def test_a_failed_request_is_marked(traced, file):
    traced.large.script.status = 500
    ask(traced)
    spans = spans_of(file, 4)
    assert spans["attempt large"].status.status_code == spans["POST /v1/chat/completions"].status.status_code == "ERROR"
    assert spans["attempt small"].status.status_code == "UNSET"


def test_checks_and_shadows_are_in_the_trace(build, file):
    asked = {"p": {"method": "shadow", "share": 1, "of": {"method": "self_verify", "threshold": 0.1}}}
    house = build(policies=asked, default_policy="p", telemetry={"traces": {"file": str(file)}})
    house.small.script.check = {"yes": -0.1}
    ask(house)
    until(lambda: sum(map(len, read(file).spans.values())) == 4)
    (spans,) = read(file).spans.values()
    assert sorted(
        (s.name, s.attributes.get("kvlift.reason")) for s in spans if s.name != "POST /v1/chat/completions"
    ) == [
        ("attempt large", "shadow"),
        ("attempt small", "self_check"),
        ("attempt small", "verified"),
    ]


@pytest.mark.parametrize(("traceparent", "is_recorded"), [(SAMPLED, True), (None, False), (UNSAMPLED, False)])
def test_sample_bounds_the_share_and_the_clients_choice_comes_first(build, file, traceparent, is_recorded):
    house = build(telemetry={"traces": {"file": str(file), "sample": 0}})
    ask(house, traceparent=traceparent)
    assert [bool(int(parts[3], 16) & 1) for parts in told(house.small, "/v1/chat/completions")] == [is_recorded]
    if is_recorded:
        spans_of(file, 2)


def test_without_tracing_the_clients_context_goes_on_as_it_came(house):
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    ask(house)
    sent = [
        headers.get("traceparent")
        for _, headers in house.small.headers + house.large.headers
        if "traceparent" in headers
    ]
    assert sent == [SAMPLED] * 3
    house.small.headers.clear()
    ask(house, traceparent=None)
    ask(house, traceparent="garbage")
    assert all("traceparent" not in headers for _, headers in house.small.headers)


def test_probes_belong_to_no_trace(traced):
    until(lambda: any(path == "/health" for path, _ in traced.small.headers))
    assert all("traceparent" not in headers for path, headers in traced.small.headers if path == "/health")


def test_case_71_without_tracing_no_exporter_is_imported():
    code = (
        "import sys; from router.app import create_app; from router.config import Config; "
        "create_app(Config.model_validate({'tiers': [{'name': 'a', 'served': 'b', 'address': 'http://127.0.0.1:9'}], "
        "'policies': {'p': {'method': 'never'}}, 'default_policy': 'p'})); "
        "print([m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'grpc'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "endpoint", ["localhost:4317", "http://", "http://host:port/v1/traces", "grpc://host:4317", "http://a b"]
)
def test_case_71_a_malformed_endpoint_is_named_at_start(tmp_path, endpoint):
    path = tmp_path / "c.yaml"
    path.write_text(
        "tiers: [{name: a, served: b, address: 'http://127.0.0.1:9'}]\npolicies: {p: {method: never}}\n"
        f"default_policy: p\ntelemetry:\n  traces:\n    endpoint: '{endpoint}'\n"
    )
    with pytest.raises(ConfigError, match=r"c.yaml:6: telemetry.traces.endpoint: .*is no address of a collector"):
        load_config(path)


def test_a_file_that_cannot_be_written_is_named_at_start(tmp_path):
    with pytest.raises(ConfigError, match="telemetry.traces.file: .*name a file"):
        Tracing(Traces(file=tmp_path))


def test_spans_go_to_a_collector_over_http(build):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    batches = []
    collector = FastAPI()

    @collector.post("/v1/traces")
    async def take(request: Request) -> dict[str, str]:
        batches.extend(ExportTraceServiceRequest.FromString(await request.body()).resource_spans)
        return {}

    with ExitStack() as stack:
        address = stack.enter_context(serving(collector))
        house = build(telemetry={"traces": {"endpoint": f"{address}/v1/traces"}})
        ask(house)
        until(lambda: sum(len(scope.spans) for batch in batches for scope in batch.scope_spans) == 2)
    spans = [span for batch in batches for scope in batch.scope_spans for span in scope.spans]
    services = [a.value.string_value for batch in batches for a in batch.resource.attributes if a.key == "service.name"]
    assert set(services) == {"kvlift-router"}
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    assert {span.name for span in spans} == {"POST /v1/chat/completions", "attempt small"}


def test_workers_of_kvlift_up_write_where_the_router_does(tmp_path):
    from router.up import plan

    start = {"name": "a", "served": "s", "start": {"model": "m"}}
    base = {"tiers": [start], "policies": {"p": {"method": "never"}}, "default_policy": "p"}
    for traces, where in (
        ({"endpoint": "http://h:4318/v1/traces"}, "http://h:4318/v1/traces"),
        ({"file": str(tmp_path / "t")}, f"file:{tmp_path / 't'}"),
    ):
        _, (spec,) = plan(Config.model_validate({**base, "telemetry": {"traces": traces}}), tmp_path)
        at = spec.command.index("--otlp-traces-endpoint")
        assert spec.command[at + 1] == where and "--enable-trace" in spec.command
    _, (spec,) = plan(Config.model_validate(base), tmp_path)
    assert "--enable-trace" not in spec.command


def test_a_trace_holds_no_text_of_the_request_and_no_key(traced, file):
    secret = "zanzibar-4711"
    echo = {"error": {"message": secret, "code": 400}}
    traced.large.script.status, traced.large.script.error = 400, echo
    traced.large.script.lift_status, traced.large.script.lift = 400, echo
    body = {"model": "kvlift", "messages": [{"role": "user", "content": secret}]}
    traced.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"})
    spans_of(file, 4)
    assert secret not in file.read_text()
    assert json.loads(file.read_text().splitlines()[0])["name"]
