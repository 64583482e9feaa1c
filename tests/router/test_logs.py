"""The log says whose request, which trace, what came of it; never what was asked, and never a key."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.cli import _log_with
from router.config import Config
from router.telemetry.logs import JsonFormatter, TextFormatter
from tests.router.fake_worker import UNSURE, applied, until

SECRET = "zanzibar-4711"
ASKED = [{"role": "user", "content": f"What of {SECRET}?"}]


@contextmanager
def logged(formatter: logging.Formatter) -> Iterator[io.StringIO]:
    """Everything that is logged from DEBUG on, inside the block."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield out
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


@pytest.fixture(params=[TextFormatter("%(levelname)s %(message)s"), JsonFormatter()], ids=["text", "json"])
def lines(request) -> Iterator[io.StringIO]:
    with logged(request.param) as out:
        yield out


@pytest.fixture
def json_lines() -> Iterator[io.StringIO]:
    with logged(JsonFormatter()) as out:
        yield out


def parsed(out: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def requests_of(out: io.StringIO) -> list[dict[str, object]]:
    return [line for line in parsed(out) if str(line["message"]).startswith("request: ")]


def test_a_request_is_one_line_with_its_ids(json_lines, build, tmp_path):
    house = build(telemetry={"traces": {"file": str(tmp_path / "t")}})
    trace = "0af7651916cd43dd8448eb211c80319c"
    house.small.script.status = 500  # which is logged on the way
    response = house.http.post(
        "/v1/chat/completions",
        json={"model": "kvlift", "messages": ASKED},
        headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"},
    )
    asked = response.headers["x-request-id"]
    until(lambda: any(line["request_id"] == asked for line in requests_of(json_lines)))
    (line,) = [line for line in requests_of(json_lines) if line["request_id"] == asked]
    assert line["trace_id"] == trace
    assert (line["tier"], line["path"], line["outcome"], line["reason"]) == (
        "large",
        "native",
        "answered",
        "upstream_500",
    )
    assert line["ms"]["total"] > 0 and line["level"] == "info"
    warned = [line for line in parsed(json_lines) if "attempt failed" in str(line["message"])]
    assert (asked, trace) in [(line["request_id"], line["trace_id"]) for line in warned]


def test_lines_that_are_of_no_request_have_no_ids(json_lines, build):
    build()
    line = next(line for line in parsed(json_lines) if "worker up" in str(line["message"]))
    assert "request_id" not in line and "trace_id" not in line


def test_no_line_holds_prompt_text_or_a_key(lines, build, monkeypatch):
    monkeypatch.setenv("WORKER_KEY", f"worker-{SECRET}")
    house = build(small={"api_key_env": "WORKER_KEY"}, large={"api_key_env": "WORKER_KEY"})
    echo = {"error": {"message": f"cannot read {SECRET}", "code": 400}}

    def ask(**fields) -> None:
        body = {"model": "kvlift", "messages": ASKED, **fields}
        house.http.post("/v1/chat/completions", json=body, headers={"authorization": f"Bearer {SECRET}"})

    ask()
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    ask(stream=True)
    house.large.script.lift = {"status": "fallback_prefill", "reason": SECRET}
    ask()
    house.large.script.lift_status, house.large.script.lift = 400, echo
    ask()
    house.large.script.status, house.large.script.error = 400, echo
    ask(stream=True)
    house.small.script.fault_after, house.small.script.fault = 1, "error_event"
    house.small.script.error_event = echo["error"]
    ask(stream=True, model="never")
    house.small.script.words, house.small.script.fault = [SECRET], "cut"
    ask(stream=True, model="never")
    ask(model=SECRET)
    ask(kvlift={SECRET: 1})
    house.http.post("/v1/chat/completions", content=f"{{{SECRET}")
    assert "request: " in lines.getvalue() and "answer failed" in lines.getvalue()
    assert SECRET not in lines.getvalue()


def test_an_unexpected_exception_is_told_without_its_message(lines):
    def deep() -> None:
        raise ValueError(SECRET)

    try:
        try:
            deep()
        except ValueError as error:
            raise KeyError(SECRET) from error
    except KeyError:
        logging.getLogger("router.x").exception("it broke")
    told = lines.getvalue()
    assert SECRET not in told
    assert "builtins.KeyError" in told and "builtins.ValueError" in told and "in deep" in told


def test_telemetry_logs_chooses_the_format(monkeypatch):
    base = {"tiers": [{"name": "a", "served": "b", "address": "http://h"}], "policies": {"p": {"method": "never"}}}
    made: list[logging.Handler] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **given: made.extend(given["handlers"]))
    for logs, kind in (({}, TextFormatter), ({"logs": "json"}, JsonFormatter)):
        config = Config.model_validate({**base, "default_policy": "p", "telemetry": logs})
        _log_with(config, logging.StreamHandler(), "%(message)s")
        assert type(made[-1].formatter) is kind


def test_a_cancelled_request_is_told_too(json_lines, build):
    from tests.router.test_disconnect import hang_up

    house = build()
    house.small.script.fault_after, house.small.script.fault = 1, "stall"
    hang_up(house, lambda: house.small.running == 1, stream=True)
    until(lambda: requests_of(json_lines))
    assert requests_of(json_lines)[0]["outcome"] == "cancelled"
