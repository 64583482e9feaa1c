"""What is counted is what happened, under labels whose number does not grow. Numbers are those of the case list."""

from __future__ import annotations

import ast
import random
import string
from collections.abc import Iterator
from pathlib import Path

import pytest

import policies
import router
from router.record import LiftRecord, Record
from router.telemetry import labels
from router.telemetry.metrics import Metrics
from router.telemetry.standing import Standing
from tests.router.fake_worker import UNSURE, applied, until
from tests.router.scrape import Scrape
from tests.router.test_disconnect import hang_up

NOTHING = {"ready": True, "in_flight": 0, "waiting": 0, "tiers": {}, "counters": {"checks_failed": 0, "shadow": {}}}


def answered(**changes: object) -> Record:
    """A request that the small tier answered."""
    record = Record("sure", **changes)
    record.begin("small", "served-small").decided("answered", "confident")
    record.end("answered")
    return record


def read(metrics: Metrics, name: str, **wanted: str) -> float | None:
    return metrics._registry.get_sample_value(name, wanted)


def test_case_68_the_right_bucket_moves_under_the_serving_models_label():
    metrics = Metrics(Standing(lambda: NOTHING))
    record = answered()
    record.ttft_ms, record.total_ms = 120.0, 740.0
    metrics.observe(record)
    by = {"tier": "small", "model": "served-small", "path": "kept"}
    assert read(metrics, "kvlift_ttft_seconds_bucket", **by, le="0.1") == 0
    assert read(metrics, "kvlift_ttft_seconds_bucket", **by, le="0.2") == 1
    assert read(metrics, "kvlift_request_seconds_bucket", **by, le="0.5") == 0
    assert read(metrics, "kvlift_request_seconds_bucket", **by, le="0.75") == 1
    assert read(metrics, "kvlift_ttft_seconds_sum", **by) == pytest.approx(0.12)


def test_case_68_one_slow_answer_is_in_no_bucket_below_its_delay(build):
    house = build()
    house.small.script.first_token_s = 0.15
    house.stream()
    seen = Scrape(house.http)
    by = {"tier": "small", "model": "served-small", "path": "kept"}
    assert seen("kvlift_ttft_seconds_count", **by) == seen("kvlift_ttft_seconds_count") == 1
    assert seen("kvlift_ttft_seconds_bucket", **by, le="0.1") == 0
    assert seen("kvlift_ttft_seconds_sum", **by) >= 0.15


def test_a_buffered_answer_has_a_duration_and_no_first_token(build):
    house = build()
    house.ask()
    seen = Scrape(house.http)
    assert (seen("kvlift_request_seconds_count", tier="small"), seen("kvlift_ttft_seconds_count")) == (1, 0)


def test_case_68_no_reason_makes_more_series(build):
    metrics = Metrics(Standing(lambda: NOTHING))
    rng = random.Random(1)
    sizes = set()
    for number in range(1000):
        word = "".join(rng.choices(string.ascii_lowercase + "_:", k=12))
        record = Record("sure", reason=word)
        record.begin("small", "served-small").decided("failed", word)
        record.escalate(word)
        record.begin("large", "served-large").decided("answered", word)
        report = applied(ms={word: 1.0, "total": 1.0})
        record.lift = LiftRecord("applied", word, report)
        record.end("answered")
        metrics.observe(record)
        metrics.failed(word)
        if number % 100 == 0:
            sizes.add(len([line for line in metrics.text().splitlines() if not line.startswith(b"#")]))
    assert len(sizes) == 1
    assert read(metrics, "kvlift_escalations_total", policy="sure", reason="other") == 1000


def test_http_statuses_of_workers_share_a_label_by_their_first_digit(build):
    house = build()
    for status in (500, 501, 502, 503, 507, 599):
        house.small.script.status = status
        house.ask()
    assert Scrape(house.http)("kvlift_escalations_total", reason="upstream_5xx") == 5
    assert Scrape(house.http)("kvlift_escalations_total", reason="breaker_open") == 1


_PLACES = {"escalate": 0, "keep": 0, "decided": 1, "UpstreamBroken": 1, "UpstreamError": 1, "_failed": 1}


def _said(node: ast.AST) -> Iterator[ast.expr | None]:
    """What a piece of source gives as a reason or code."""
    if isinstance(node, ast.FunctionDef) and node.name in ("match", "forbid", "why_not", "_why_not"):
        yield from (inner.value for inner in ast.walk(node) if isinstance(inner, ast.Return))
    if isinstance(node, ast.Call):
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "code")
        if name in _PLACES and len(node.args) > _PLACES[name]:
            yield node.args[_PLACES[name]]


def _words() -> Iterator[str]:
    """Every reason and code that policies and router can give, as their source says it."""
    for package in (policies, router):
        for file in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                for said in _said(node):
                    ends = (said.body, said.orelse) if isinstance(said, ast.IfExp) else (said,)
                    yield from (e.value for e in ends if isinstance(e, ast.Constant) and isinstance(e.value, str))


def test_every_word_of_the_router_has_a_label_of_its_own():
    words = set(_words())
    assert {
        "low_confidence",
        "keyword",
        "pinned",
        "breaker_open",
        "connection_lost",
        "queue_full",
        "self_check",
    } <= words  # it does find them
    assert words - {"not_found"} <= labels.REASONS


@pytest.mark.parametrize("stream", [False, True], ids=["buffered", "streamed"])
def test_case_9_tokens_are_what_the_workers_counted(build, stream):
    house = build()
    for number in range(9):
        house.small.script.logprob = UNSURE if number % 3 else -0.01
        house.large.script.lift = applied() if number % 2 else {"status": "unsupported", "reason": "x"}
        (house.stream if stream else house.ask)()
    seen = Scrape(house.http)
    for tier, worker in (("small", house.small), ("large", house.large)):
        words = len(worker.calls) * len(worker.script.words)
        spent = seen("kvlift_tokens_total", tier=tier, kind="completion") + seen(
            "kvlift_tokens_total", tier=tier, kind="discarded"
        )
        assert spent == words > 0
        assert seen("kvlift_tokens_total", tier=tier, kind="prompt") == 11 * len(worker.calls)
        assert seen("kvlift_tokens_total", tier=tier, kind="cached") == 5 * len(worker.calls)
    assert seen("kvlift_tokens_total", tier="small", kind="discarded") == 6 * 2
    assert seen("kvlift_escalations_total", policy="sure", reason="low_confidence") == 6


def test_case_9_an_attempt_that_is_cut_short_counts_what_came(build):
    house = build()
    house.small.script.logprob = UNSURE
    house.stream(model="worst")  # left after the first token
    assert Scrape(house.http)("kvlift_tokens_total", tier="small", kind="discarded") == 1


def test_a_lift_is_counted_by_status_tokens_bytes_and_phase(build):
    house = build()
    house.small.script.logprob = UNSURE
    house.large.script.lift = applied()
    house.stream()
    house.large.script.lift = {"status": "fallback_prefill", "reason": "gone"}
    house.stream()
    seen = Scrape(house.http)
    assert {s: seen("kvlift_lifts_total", status=s) for s in ("applied", "fallback_prefill")} == {
        "applied": 1,
        "fallback_prefill": 1,
    }
    assert seen("kvlift_lift_bytes_total", tier="large") == 4096
    kinds = {kind: seen("kvlift_tokens_total", tier="large", kind=kind) for kind in ("reused", "mapped", "recomputed")}
    assert kinds == {"reused": 0, "mapped": 7, "recomputed": 4}
    assert seen("kvlift_lift_phase_seconds_total", phase="map") == pytest.approx(0.001)
    assert seen("kvlift_lift_seconds_count") == 1
    assert seen("kvlift_ttft_seconds_count", path="lifted") == seen("kvlift_ttft_seconds_count", path="native") == 1


def test_every_request_is_counted_once_by_how_it_ended(build):
    house = build()
    house.ask()
    house.ask(model="large")
    house.ask(model="nobody")
    house.small.script.status, house.small.script.error = 400, {"error": {"message": "no", "code": 400}}
    house.ask()
    house.small.script.status = 200
    house.large.script.status = 500
    house.ask(model="large")
    house.large.script.status = 200
    house.small.script.fault_after, house.small.script.fault = 1, "cut"
    house.stream(model="never")
    house.small.script.fault = "stall"
    hang_up(house, lambda: house.small.running == 1, stream=True)
    until(lambda: house.gateway.idle)
    seen = Scrape(house.http)
    outcomes = {o: seen("kvlift_requests_total", outcome=o) for o in ("answered", "refused", "failed", "cancelled")}
    assert outcomes == {"answered": 2, "refused": 1, "failed": 2, "cancelled": 1}
    codes = ("model_not_found", "upstream_4xx", "upstream_5xx", "connection_lost")
    assert [seen("kvlift_errors_total", code=code) for code in codes] == [1, 1, 1, 1]
    assert seen("kvlift_errors_total") == 4
    assert seen("kvlift_requests_total", policy="large", path="pinned") == 2


def test_case_42_gauges_return_to_zero(build):
    house = build()
    house.small.script.fault_after, house.small.script.fault = 1, "stall"

    def during() -> bool:
        seen = Scrape(house.http)
        return seen("kvlift_in_flight") == seen("kvlift_worker_in_flight", tier="small") == 1

    for _ in range(3):
        hang_up(house, during, stream=True)
        until(lambda: house.gateway.idle)
        seen = Scrape(house.http)
        assert seen("kvlift_in_flight") == seen("kvlift_queued") == seen("kvlift_worker_in_flight") == 0


def test_workers_are_shown_as_they_stand(build):
    house = build(health={"interval_s": 0.05, "misses": 1}, breaker={"failures": 1, "interval_s": 60})
    house.small.script.queued = 3
    until(lambda: Scrape(house.http)("kvlift_worker_queued", tier="small") == 3)
    assert Scrape(house.http)("kvlift_worker_up") == 2
    house.large.script.status = 500
    house.ask(model="large")
    assert Scrape(house.http)("kvlift_worker_breaker_open", tier="large") == 1
    assert Scrape(house.http)("kvlift_ready") == 1
    house.small.script.health_status = 500
    until(lambda: Scrape(house.http)("kvlift_worker_up", tier="small") == 0)
    assert Scrape(house.http)("kvlift_ready") == 0


def test_shadow_calls_and_checks_are_counted(build):
    asked = {
        "shadowed": {"method": "shadow", "share": 1, "of": {"method": "self_verify", "threshold": 0.1}},
        "sure": {"method": "avg_logprob", "threshold": -1.0},
    }
    house = build(policies=asked)
    house.small.script.check = {"yes": -0.1}
    house.ask(model="shadowed")
    until(lambda: Scrape(house.http)("kvlift_shadows_total") == 1)
    seen = Scrape(house.http)
    assert seen("kvlift_shadows_total", outcome="disagreed") == 1
    assert seen("kvlift_tokens_total", tier="large", kind="shadow") == 3
    assert seen("kvlift_attempts_total", tier="small", reason="self_check") == 1
