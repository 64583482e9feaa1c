"""A lift whose recompute is divided over steps, because somebody decodes: the same KV, and nothing is lost."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from tests.worker.conftest import STEP_POSITIONS, Fleet
from tests.worker.servers import Worker, cached, first_logprobs, text
from tests.worker.test_lift import SELECTORS, close

PACK = "tiny-small-to-large"


def begun(worker: Worker, before: dict[str, int], lift: Future[Any]) -> None:
    """Waits until the worker has recomputed something since `before`, and the lift is still open."""
    deadline = time.monotonic() + 60
    while worker.counters()["recomputed_positions"] == before["recomputed_positions"]:
        assert time.monotonic() < deadline and not lift.done(), lift.result()
        time.sleep(0.005)


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_divided_lift_gives_what_an_undivided_one_gives(fleet: Fleet, prompt, selector: str):
    ids = prompt(130, seed=300)
    fleet.small.generate(ids, tokens=1)

    def lift() -> tuple[dict[str, Any], dict[str, Any], int]:
        before = fleet.paged.counters()
        lifted = fleet.paged.lift(fleet.small, ids, PACK, rho=0.5, selector=selector, explain=True)
        batches = fleet.paged.counters()["lift_batches"] - before["lift_batches"]
        return lifted, fleet.paged.generate(ids, extra_key=lifted["namespace"]), batches

    whole, one, batches = lift()
    assert batches == 1
    fleet.paged.flush()
    with fleet.paged.decoding(prompt(20, seed=301)):
        divided, other, batches = lift()
    positions = divided["tokens"]["recomputed"] + len(ids) - cached(other)  # with the tail
    assert batches == -(-positions // STEP_POSITIONS)
    assert divided["explain"] == whole["explain"] and divided["tokens"] == whole["tokens"]
    assert cached(one) == cached(other) == 128
    assert close(first_logprobs(one), first_logprobs(other)) and text(one) == text(other)


def test_a_divided_full_budget_gives_the_native_logits(fleet: Fleet, prompt):
    ids = prompt(100, seed=302)
    fleet.small.generate(ids, tokens=1)
    with fleet.paged.decoding(prompt(20, seed=303)):
        lifted = fleet.paged.lift(fleet.small, ids, PACK, rho=1.0)
    ours, native = fleet.paged.generate(ids, extra_key=lifted["namespace"]), fleet.paged.generate(ids)
    assert close(first_logprobs(ours), first_logprobs(native)) and text(ours) == text(native)


def test_open_lifts_are_taken_on_in_order_of_arrival(fleet: Fleet, prompt):
    long, short = prompt(400, seed=304), prompt(40, seed=305)
    for ids in (long, short):
        fleet.small.generate(ids, tokens=1)
    ended: list[str] = []
    with ThreadPoolExecutor(2) as pool, fleet.paged.decoding(prompt(20, seed=306)):
        before = fleet.paged.counters()

        def lift(name: str, ids: list[int]) -> str:
            status = fleet.paged.lift(fleet.small, ids, PACK, rho=1.0)["status"]
            ended.append(name)
            return status

        first = pool.submit(lift, "long", long)
        begun(fleet.paged, before, first)
        second = pool.submit(lift, "short", short)
        assert first.result() == second.result() == "applied"
    assert ended == ["long", "short"]


def test_a_batch_takes_no_more_lifts_than_sglang_takes_prefills(fleet: Fleet, prompt):
    """`--prefill-max-requests 2`. A long native prefill keeps the scheduler busy while they arrive."""
    prompts = [prompt(40, seed=320 + number) for number in range(5)]
    for ids in prompts:
        fleet.small.generate(ids, tokens=1)
    before = fleet.paged.counters()
    with ThreadPoolExecutor(6) as pool:
        pool.submit(fleet.paged.generate, prompt(4000, seed=319), 1)
        lifted = list(pool.map(lambda ids: fleet.paged.lift(fleet.small, ids, PACK), prompts))
    assert {one["status"] for one in lifted} == {"applied"}
    assert fleet.paged.counters()["lift_batches"] - before["lift_batches"] >= 3


def test_a_flush_in_the_middle_of_a_lift_frees_it(fleet: Fleet, prompt):
    """SGLang refuses to flush under a running request; the lift has ended all the same, and nobody's text changes."""
    watched, ids = prompt(20, seed=307), prompt(600, seed=308)
    fleet.small.generate(ids, tokens=1)
    with ThreadPoolExecutor(1) as pool, fleet.paged.decoding(watched):
        before = fleet.paged.counters()
        lift = pool.submit(fleet.paged.lift, fleet.small, ids, PACK, rho=1.0)
        begun(fleet.paged, before, lift)
        fleet.paged.client.post("/flush_cache")
        answer = lift.result()
    assert answer["status"] == "fallback_prefill" and "flushed" in answer["reason"]
    assert fleet.paged.counters()["recomputed_positions"] - before["recomputed_positions"] < 590
    fleet.paged.flush()
    assert fleet.paged.lift(fleet.small, ids, PACK)["tokens"]["prefix"] == 0


def test_a_timeout_in_the_middle_of_a_lift_frees_it(fleet: Fleet, prompt):
    ids = prompt(3000, seed=309)
    fleet.small.generate(ids, tokens=1)
    with fleet.paged.decoding(prompt(20, seed=310)):
        answer = fleet.paged.lift(fleet.small, ids, PACK, rho=1.0, timeout_s=1.5)
    assert answer["status"] == "fallback_prefill" and "longer than 1.5 s" in answer["reason"]
    fleet.paged.flush()
    assert cached(fleet.paged.generate(ids[:100])) == 0
