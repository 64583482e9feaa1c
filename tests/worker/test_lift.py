"""Laws of export and lift on real SGLang workers, fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.rope import Rotation
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import budget_of, scorer_named
from tests.worker.conftest import HEAD_PACK, PACK, Fleet
from tests.worker.servers import cached, first_logprobs, text

TOLERANCE = 1e-3
SELECTORS = ("rank_disagreement", "random:3", "source_attention")


def close(left: dict[int, float], right: dict[int, float]) -> bool:
    """Equal log-probabilities on every token that both list."""
    shared = left.keys() & right.keys()
    return len(shared) >= len(left) - 2 and all(abs(left[t] - right[t]) < TOLERANCE for t in shared)


@pytest.mark.parametrize("name", ["small", "large", "smol"])
def test_an_exported_block_is_the_models_own_kv(fleet: Fleet, reference: dict[str, TransformersExecutor], prompt, name: str):
    worker, ids = getattr(fleet, name), prompt(70)
    worker.generate(ids, tokens=1)
    exported = worker.call("/kv/export", input_ids=ids)
    assert exported["tokens"] == len(ids)
    block = KVBlock.load(Path("/dev/shm") / exported["handle"])
    worker.call("/kv/release", handle=exported["handle"])
    rows, _ = reference[name].prefill([ids])
    assert block.tokens.tolist() == ids
    assert torch.allclose(block.values, rows[0].values, atol=1e-3, rtol=1e-3)
    for layer in range(block.geometry.layers):
        at_home = block.keys_at(layer, 0, Rotation(block.geometry.rope))
        assert torch.allclose(at_home, rows[0].keys[layer], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("length", [1, 31, 33, 70])
@pytest.mark.parametrize("name", ["small", "large", "smol"])
def test_the_attention_in_a_block_is_the_transformers_executors_and_costs_the_source_nothing(
    fleet: Fleet, reference: dict[str, TransformersExecutor], prompt, name: str, length: int
):
    worker, ids = getattr(fleet, name), prompt(length, seed=8)
    native = worker.generate(ids, tokens=12)

    def export(attention: bool) -> KVBlock:
        exported = worker.call("/kv/export", input_ids=ids, attention=attention)
        block = KVBlock.load(Path("/dev/shm") / exported["handle"])
        worker.call("/kv/release", handle=exported["handle"])
        return block

    before, block, after = export(False), export(True), export(False)
    assert before.attention is None and after.attention is None
    rows, _ = reference[name].prefill([ids])
    assert torch.allclose(block.attention, reference[name].attention_received(rows[0], ids), atol=1e-5)
    assert float(block.attention.sum()) == pytest.approx(1)
    # The queries ran again, and the pool's live slots hold what they held.
    for other in (block, after):
        assert torch.equal(other.keys, before.keys) and torch.equal(other.values, before.values)
    assert text(worker.generate(ids, tokens=12)) == text(native)


@pytest.mark.parametrize("name", ["large", "smol"])
def test_a_model_lifted_onto_itself_without_recompute_gives_the_native_text(fleet: Fleet, prompt, name: str):
    """Export, undo rotation, map by the identity, rotate, insert: nothing may be lost on the way."""
    worker, ids = getattr(fleet, name), prompt(120, seed=1)
    native = worker.generate(ids)
    # Another salt keeps the native copy out of reach, so that the namespace holds lifted KV only.
    lifted = worker.lift(worker, ids, "identity", rho=0.0, cache_salt="other")
    assert lifted["status"] == "applied", lifted
    assert lifted["tokens"] == {"prompt": 120, "prefix": 0, "lifted": 119, "recomputed": 0}
    again = worker.generate(ids, extra_key=lifted["namespace"])
    assert cached(again) == len(ids) - 1
    assert text(again) == text(native)
    assert close(first_logprobs(again), first_logprobs(native))


def test_mapped_kv_is_never_seen_without_its_namespace(fleet: Fleet, prompt):
    """Case 46."""
    ids = prompt(100, seed=2)
    fleet.small.generate(ids, tokens=1)
    lifted = fleet.large.lift(fleet.small, ids, "tiny-small-to-large")
    assert lifted["status"] == "applied", lifted
    assert cached(fleet.large.generate(ids)) == 0
    assert cached(fleet.large.generate(ids, extra_key=lifted["namespace"])) == len(ids) - 1


def test_salts_share_nothing(fleet: Fleet, prompt):
    """Case 44: another tenant's salt gives another namespace, and no export of this one's KV."""
    ids = prompt(60, seed=3)
    fleet.small.generate(ids, tokens=1, cache_salt="a")
    where = {"url": fleet.small.url, "cache_salt": "b"}
    refused = fleet.large.lift(fleet.small, ids, "tiny-small-to-large", source=where, cache_salt="b")
    assert refused["status"] == "fallback_prefill" and "no KV of this prompt" in refused["reason"]
    spaces = set()
    for salt in ("a", "b", None):
        where = {"url": fleet.small.url, "cache_salt": "a"}
        answer = fleet.large.lift(fleet.small, ids, "tiny-small-to-large", source=where, cache_salt=salt)
        spaces.add(answer["namespace"])
    assert len(spaces) == 3


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("pack", ["noise", PACK.name, HEAD_PACK.name])
def test_a_full_budget_gives_the_native_logits_whatever_the_map(fleet: Fleet, prompt, pack: str, selector: str):
    ids = prompt(90, seed=4)
    fleet.small.generate(ids, tokens=1)
    lifted = fleet.large.lift(fleet.small, ids, pack, rho=1.0, selector=selector)
    assert lifted["chosen_rho"] == 1.0
    assert lifted["tokens"]["recomputed"] == lifted["tokens"]["lifted"] == len(ids) - 1
    ours = fleet.large.generate(ids, extra_key=lifted["namespace"])
    native = fleet.large.generate(ids)
    assert cached(ours) == len(ids) - 1 and cached(native) == 0
    assert close(first_logprobs(ours), first_logprobs(native))
    assert text(ours) == text(native)


def test_a_full_budget_on_a_llama_model_gives_the_native_logits(fleet: Fleet, prompt):
    ids = prompt(90, seed=6)
    native = fleet.smol.generate(ids)
    lifted = fleet.smol.lift(fleet.smol, ids, "identity", rho=1.0, cache_salt="other")
    assert lifted["tokens"]["recomputed"] == len(ids) - 1
    ours = fleet.smol.generate(ids, extra_key=lifted["namespace"])
    assert cached(ours) == len(ids) - 1
    assert close(first_logprobs(ours), first_logprobs(native)) and text(ours) == text(native)


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("budget", [{"rho": 0.0}, {"rho": 0.2}, {"rho": 0.5}, {"coverage": 0.4}])
@pytest.mark.parametrize("pack", [PACK, HEAD_PACK], ids=["full", "head"])
def test_map_score_and_chosen_set_equal_the_transformers_executor(
    fleet: Fleet, reference: dict[str, TransformersExecutor], prompt, selector: str, budget: dict[str, float], pack: Path
):
    ids = prompt(110, seed=5)
    fleet.small.generate(ids, tokens=1)
    lifted = fleet.large.lift(fleet.small, ids, pack.name, selector=selector, explain=True, **budget)
    small = reference["small"]
    rows, _ = small.prefill([ids])
    block = small.block(rows[0], ids, attention=small.attention_received(rows[0], ids))
    maps, scorer = Pack.load(pack).maps, scorer_named(selector)
    asked = budget_of(budget.get("rho", 0.0), budget.get("coverage"))
    _, logits, [plan] = reference["large"].lift([ids], [block], maps, scorer, asked)
    span = block.span(0, len(ids) - 1)
    scores = scorer(span, reference["large"].fill_mapped(reference["large"].row(len(ids)), span, maps))
    theirs = torch.tensor(lifted["explain"]["scores"])
    assert torch.allclose(theirs, scores, rtol=2e-3, atol=1e-3 * float(scores.max()))
    assert lifted["explain"]["positions"] == plan.compute[:-1].tolist()
    assert lifted["chosen_rho"] == len(plan.compute) / len(ids)
    assert (lifted["rho"], lifted["coverage"]) == (budget.get("rho"), budget.get("coverage"))
    ours = first_logprobs(fleet.large.generate(ids, extra_key=lifted["namespace"]))
    expected = logits[0].log_softmax(-1)
    assert all(abs(expected[token] - logprob) < TOLERANCE for token, logprob in ours.items())


def test_a_batch_of_lifts_gives_what_single_lifts_give(fleet: Fleet, prompt):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [prompt(40 + 13 * i, seed=10 + i) for i in range(8)]
    for ids in prompts:
        fleet.small.generate(ids, tokens=1)

    def lift(ids: list[int]) -> dict:
        selector = SELECTORS[len(ids) % len(SELECTORS)]
        return fleet.large.lift(fleet.small, ids, "tiny-small-to-large", selector=selector, explain=True)

    def answers(lifted: list[dict]) -> list[dict]:
        return [fleet.large.generate(ids, extra_key=one["namespace"]) for ids, one in zip(prompts, lifted)]

    alone = [lift(ids) for ids in prompts]
    single = answers(alone)
    fleet.large.flush()
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lift, prompts))
    batched = answers(together)
    for one, other, left, right in zip(alone, together, single, batched):
        assert one["explain"]["positions"] == other["explain"]["positions"]
        assert one["tokens"] == other["tokens"]
        assert close(first_logprobs(left), first_logprobs(right))
        assert text(left) == text(right)


def test_the_same_prompt_lifted_twice_at_once_leaves_one_copy(fleet: Fleet, prompt):
    from concurrent.futures import ThreadPoolExecutor

    ids = prompt(80, seed=20)
    fleet.small.generate(ids, tokens=1)
    with ThreadPoolExecutor(4) as pool:
        lifted = list(pool.map(lambda _: fleet.large.lift(fleet.small, ids, "tiny-small-to-large"), range(4)))
    assert {one["status"] for one in lifted} == {"applied"}
    assert len({one["namespace"] for one in lifted}) == 1
    assert cached(fleet.large.generate(ids, extra_key=lifted[0]["namespace"])) == len(ids) - 1


def test_only_what_the_target_does_not_hold_is_lifted(fleet: Fleet, prompt):
    """A native prefix is copied, a lifted one is kept, and the next turn lifts only its own part."""
    first, second = prompt(60, seed=30), prompt(40, seed=31)
    fleet.small.generate(first + second, tokens=1)
    afresh = fleet.large.lift(fleet.small, first + second, "tiny-small-to-large", explain=True)
    fleet.large.flush()
    fleet.large.generate(first, tokens=1)
    lifted = fleet.large.lift(fleet.small, first + second, "tiny-small-to-large", explain=True)
    # The budget is a share of the whole prompt: what is recomputed of the rest does not depend on the cache.
    assert lifted["explain"]["positions"] == [p for p in afresh["explain"]["positions"] if p >= 60]
    assert lifted["tokens"] == {
        "prompt": 100, "prefix": 60, "lifted": 39, "recomputed": len(lifted["explain"]["positions"])
    }  # fmt: skip
    answer = fleet.large.generate(first + second, extra_key=lifted["namespace"])
    assert cached(answer) == 99

    turn = first + second + text(answer) + prompt(30, seed=32)
    fleet.small.generate(turn, tokens=1)
    again = fleet.large.lift(fleet.small, turn, "tiny-small-to-large")
    held = again["tokens"]["prefix"]
    assert held >= 100 and held + again["tokens"]["lifted"] == len(turn) - 1
    assert cached(fleet.large.generate(turn, extra_key=again["namespace"])) == len(turn) - 1


def test_a_source_that_holds_a_prefix_gives_that_much(fleet: Fleet, prompt):
    ids = prompt(90, seed=40)
    fleet.small.generate(ids[:50], tokens=1)
    lifted = fleet.large.lift(fleet.small, ids, "noise", rho=1.0)
    assert lifted["tokens"]["lifted"] == 50
    ours = fleet.large.generate(ids, extra_key=lifted["namespace"])
    assert cached(ours) == 50
    assert text(ours) == text(fleet.large.generate(ids))


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 32, 33, 100])
def test_whole_pages_are_lifted_and_the_tail_is_computed(fleet: Fleet, prompt, length: int):
    """Case 48, pages of 16: lengths around a page, and T = 1."""
    ids = prompt(length, seed=50 + length)
    native = fleet.large.generate(ids)
    lifted = fleet.paged.lift(fleet.large, ids, "identity", rho=0.0)
    pages = (length - 1) // 16 * 16
    if pages == 0:
        assert lifted["status"] == "fallback_prefill" and lifted["reason"]
        answer = fleet.paged.generate(ids)
    else:
        assert lifted["status"] == "applied", lifted
        assert lifted["tokens"]["lifted"] == pages
        answer = fleet.paged.generate(ids, extra_key=lifted["namespace"])
    assert cached(answer) == pages
    assert text(answer) == text(native)
