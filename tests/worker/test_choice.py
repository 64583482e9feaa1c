"""What a worker measured of itself, what it chooses by it, and what it counts."""

from __future__ import annotations

import math

import pytest

from sglang_ext.worker.cost import CostModel
from tests.worker.conftest import Fleet
from tests.worker.servers import cached

PACK = "tiny-small-to-large"


def costs_of(fleet: Fleet) -> CostModel:
    return CostModel.model_validate(fleet.large.client.get("/kv/capabilities").json()["costs"])


def digest_of(fleet: Fleet) -> str:
    packs = fleet.large.client.get("/kv/capabilities").json()["packs"]
    return next(pack["digest"] for pack in packs if pack["name"] == PACK)


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in before if after[name] != before[name]}


def test_a_worker_with_packs_has_measured_its_costs(fleet: Fleet):
    """Pages of 16 or of 1, Qwen3 or Llama; a worker that never lifts measures nothing."""
    for worker in (fleet.large, fleet.paged, fleet.smol):
        told = worker.client.get("/kv/capabilities").json()
        costs = CostModel.model_validate(told["costs"])
        assert set(costs.packs) == {pack["digest"] for pack in told["packs"]}
        lengths = (1, 10, 100, 1000, 8000)
        for ms in (costs.native_ms, lambda n, costs=costs: costs.lift_ms(next(iter(costs.packs)), n, 0.3)):
            figures = [ms(length) for length in lengths]
            assert all(0 < figure < math.inf for figure in figures) and figures == sorted(figures)
    assert fleet.small.client.get("/kv/capabilities").json()["costs"] is None


def test_a_lift_that_would_be_slower_is_declined_and_nobody_is_asked(fleet: Fleet, prompt):
    """All positions again, and the map: `faster` is the default, and the figures are the worker's own."""
    costs, digest = costs_of(fleet), digest_of(fleet)
    # A recompute is timed by itself, so that one length may be found cheaper than a native prefill of it.
    length = max(range(12, 1000), key=lambda n: costs.lift_ms(digest, n, 1.0) / costs.native_ms(n))
    ids = prompt(length, seed=200)
    fleet.small.generate(ids, tokens=1)
    before, source = fleet.large.counters(), fleet.small.counters()
    answer = fleet.large.call("/kv/lift", input_ids=ids, source={"url": fleet.small.url}, pack=PACK, rho=1.0)
    assert answer["choice"] == costs.choose(digest, length, 1.0, always=False).model_dump()
    assert answer["choice"]["chosen"] == "native" and answer["status"] == "fallback_prefill"
    assert "expected to be faster" in answer["reason"] and "namespace" not in answer
    assert difference(before, fleet.large.counters()) == {"lifts_declined": 1}
    assert difference(source, fleet.small.counters()) == {}


@pytest.mark.parametrize("budget", [{"rho": 0.3}, {"coverage": 0.5}])
def test_a_forced_lift_says_what_the_choice_would_have_been(fleet: Fleet, prompt, budget: dict[str, float]):
    ids = prompt(40, seed=201)
    fleet.small.generate(ids, tokens=1)
    answer = fleet.large.lift(fleet.small, ids, PACK, **budget)
    [share] = budget.values()
    assert answer["status"] == "applied"
    assert answer["choice"] == costs_of(fleet).choose(digest_of(fleet), len(ids), share, always=True).model_dump()


def test_the_scheduler_declines_what_is_here_natively(fleet: Fleet, prompt):
    """The HTTP side judges as if nothing were cached; the scheduler knows better, and then copies nothing."""
    ids = prompt(3000, seed=202)
    fleet.small.generate(ids, tokens=1)
    fleet.large.generate(ids, tokens=1)
    answer = fleet.large.call("/kv/lift", input_ids=ids, source={"url": fleet.small.url}, pack=PACK, timeout_s=60)
    expected = costs_of(fleet)
    if expected.choose(digest_of(fleet), len(ids), 0.3, always=False).chosen == "lift":
        assert answer["choice"]["native_ms"] == pytest.approx(expected.native_ms(len(ids), cached=len(ids) - 1))
    assert answer["choice"]["chosen"] == "native" and answer["status"] == "fallback_prefill"
    assert cached(fleet.large.generate(ids)) == len(ids) - 1


def test_counters_count_what_happened(fleet: Fleet, prompt):
    before, source = fleet.large.counters(), fleet.small.counters()
    assert set(before) == {
        "prefill_batches", "prefill_requests", "lift_batches", "lifts", "lifts_declined", "lifts_failed",
        "recomputed_positions", "exported_bytes", "document_batches", "compiled_positions", "inline_positions",
        "prompts_linked", "document_hits", "documents_compiled", "documents_missed", "documents_broken",
        "documents_storage_failed", "tails_used",
    }  # fmt: skip
    for seed in range(3):
        fleet.large.generate(prompt(30, seed=210 + seed), tokens=3)
    assert fleet.large.client.get("/health").status_code == 200
    assert difference(before, fleet.large.counters()) == {"prefill_batches": 3, "prefill_requests": 3}

    before, ids = fleet.large.counters(), prompt(80, seed=220)
    fleet.small.generate(ids, tokens=1)
    lifted = fleet.large.lift(fleet.small, ids, PACK)
    recomputed = lifted["tokens"]["recomputed"] + 1  # with the last token
    assert difference(before, fleet.large.counters()) == {
        "lifts": 1, "lift_batches": 1, "recomputed_positions": recomputed
    }  # fmt: skip
    told = difference(source, fleet.small.counters())
    assert told == {"prefill_batches": 1, "prefill_requests": 1, "exported_bytes": lifted["bytes"]}

    before = fleet.large.counters()
    assert fleet.large.lift(fleet.small, prompt(80, seed=221), PACK)["status"] == "fallback_prefill"
    assert fleet.large.lift(fleet.small, ids, "nobody")["status"] == "unsupported"
    assert difference(before, fleet.large.counters()) == {"lifts_failed": 2}
