"""The end of a lifted or linked prompt: what a job's forward computed of it is what SGLang's would, and it is used."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.worker.conftest import Fleet
from tests.worker.documents import add, flat, link
from tests.worker.servers import Worker, cached, first_logprobs, text
from tests.worker.test_lift import close

PACK = "tiny-small-to-large"
PAGES = {"large": 1, "paged": 16}


def used(worker: Worker) -> int:
    return worker.counters()["tails_used"]


def lifted(fleet: Fleet, worker: Worker, ids: list[int], **more: Any) -> str:
    """The namespace of a lift of this prompt."""
    fleet.small.generate(ids, tokens=1)
    answer = worker.lift(fleet.small, ids, PACK, **more)
    assert answer["status"] == "applied", answer
    return answer["namespace"]


@pytest.mark.parametrize("length", [49, 63, 64, 65])
@pytest.mark.parametrize("name", ["large", "paged"])
def test_the_request_of_a_lift_takes_no_forward_and_says_the_same(fleet: Fleet, prompt, name: str, length: int):
    worker, ids = getattr(fleet, name), prompt(length, seed=1100)
    space, before = lifted(fleet, worker, ids), used(worker)
    first = worker.generate(ids, extra_key=space)
    assert used(worker) == before + 1
    second = worker.generate(ids, extra_key=space)
    assert used(worker) == before + 1, "the lease has ended with the request for which it was"
    assert cached(first) == cached(second) == (length - 1) // PAGES[name] * PAGES[name]
    assert close(first_logprobs(first), first_logprobs(second)) and text(first) == text(second)
    worker.rest()


def test_a_budget_of_nothing_has_a_tail_too(fleet: Fleet, prompt):
    ids = prompt(70, seed=1101)
    space, before = lifted(fleet, fleet.large, ids, rho=0.0), used(fleet.large)
    first, second = (fleet.large.generate(ids, extra_key=space) for _ in range(2))
    assert used(fleet.large) == before + 1
    assert close(first_logprobs(first), first_logprobs(second)) and text(first) == text(second)


def test_the_request_of_a_link_takes_no_forward_and_says_the_same(fleet: Fleet, prompt):
    documents = {add(fleet.large, ids): ids for ids in (prompt(30, seed=1102), prompt(21, seed=1103))}
    a, b = documents
    for spans in ([prompt(9, seed=1104), a, b, prompt(5, seed=1105)], [b, a]):
        ids, before = flat(spans, documents), used(fleet.large)
        space = link(fleet.large, spans, documents)["namespace"]
        first, second = (fleet.large.generate(ids, extra_key=space) for _ in range(2))
        assert used(fleet.large) == before + 1
        assert close(first_logprobs(first), first_logprobs(second)) and text(first) == text(second)


def test_each_of_several_lifts_in_one_namespace_waits_for_its_own_request(fleet: Fleet, prompt):
    prompts = [prompt(40 + number, seed=1140 + number) for number in range(4)]
    spaces = [lifted(fleet, fleet.large, ids, lease_s=120) for ids in prompts]
    assert len(set(spaces)) == 1 and fleet.large.held()["leases"] == 4
    for left, ids in zip((3, 2, 1, 0), prompts, strict=True):
        before = used(fleet.large)
        fleet.large.generate(ids, extra_key=spaces[0])
        assert (used(fleet.large), fleet.large.held()["leases"]) == (before + 1, left)


def test_what_is_no_tail_is_computed(fleet: Fleet, prompt):
    """Another prompt in the namespace, a longer one, one whose log-probabilities are asked, one that was not lifted."""
    ids = prompt(60, seed=1106)
    space, before = lifted(fleet, fleet.large, ids, lease_s=120), used(fleet.large)
    other = [*ids[:-1], (ids[-1] + 1) % 200]
    longer = [*ids, 5, 6]
    for wrong in (other, longer):
        native = fleet.large.generate(wrong)
        ours = fleet.large.generate(wrong, extra_key="of nobody")
        assert close(first_logprobs(ours), first_logprobs(native))
    asked = fleet.large.generate(ids, extra_key=space, logprob_start_len=len(ids) - 1)
    assert used(fleet.large) == before and len(asked["meta_info"]["input_token_logprobs"]) == 1
    for wrong in (other, longer):
        space = lifted(fleet, fleet.large, ids, rho=1.0, lease_s=120)
        ours, native = fleet.large.generate(wrong, extra_key=space), fleet.large.generate(wrong)
        assert close(first_logprobs(ours), first_logprobs(native))
    assert used(fleet.large) == before
    fleet.large.flush()


def test_a_block_that_ends_early_leaves_the_rest_to_sglang(fleet: Fleet, prompt):
    ids = prompt(90, seed=1107)
    fleet.small.generate(ids[:50], tokens=1)
    before = used(fleet.large)
    answer = fleet.large.lift(fleet.small, ids, PACK, rho=1.0)
    assert answer["tokens"]["lifted"] == 50
    ours, native = fleet.large.generate(ids, extra_key=answer["namespace"]), fleet.large.generate(ids)
    assert used(fleet.large) == before and close(first_logprobs(ours), first_logprobs(native))


def test_sampling_and_grammars_see_no_difference(fleet: Fleet, prompt):
    """A temperature, penalties, a bias and a JSON schema, on known logits and on computed ones."""
    ids = prompt(60, seed=1108)
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for sampling in (
        {"temperature": 2.0, "top_k": 1, "max_new_tokens": 12, "ignore_eos": True},
        {"temperature": 0.0, "logit_bias": {"65": 100}, "max_new_tokens": 1, "ignore_eos": True},
        {"temperature": 0.0, "frequency_penalty": 1.0, "max_new_tokens": 12, "ignore_eos": True},
        {"temperature": 0.0, "json_schema": json.dumps(number), "max_new_tokens": 24},
    ):
        fleet.large.flush()
        space, before = lifted(fleet, fleet.large, ids), used(fleet.large)
        said = [
            fleet.large.call("/generate", input_ids=ids, sampling_params=sampling, extra_key=space)["output_ids"]
            for _ in range(2)
        ]
        assert used(fleet.large) == before + 1 and said[0] == said[1], sampling


def test_among_strangers_each_says_what_it_says_alone(fleet: Fleet, prompt):
    """Lifted requests, with native ones in the same batches or not; a batch of both runs whole."""
    prompts = [prompt(40 + 7 * number, seed=1110 + number) for number in range(8)]
    options = {"rho": 1.0, "lease_s": 120}
    spaces = [lifted(fleet, fleet.large, ids, **options) if at % 2 else None for at, ids in enumerate(prompts)]
    before = used(fleet.large)

    def ask(at: int) -> dict[str, Any]:
        more = {} if spaces[at] is None else {"extra_key": spaces[at]}
        return fleet.large.generate(prompts[at], **more)

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(ask, range(8)))
    assert used(fleet.large) <= before + 4
    for at, ids in enumerate(prompts):
        native = fleet.large.generate(ids, extra_key=f"alone {at}")
        assert close(first_logprobs(together[at]), first_logprobs(native)) and text(together[at]) == text(native)
    fleet.large.rest()
