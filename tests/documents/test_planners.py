"""Online planners compute what their rule says, of the documents' own tokens and at their budget."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.attention import attention_weights
from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.link import link
from sglang_ext.documents.planners import NAMES, planner_named
from sglang_ext.errors import PlanError
from sglang_ext.offline.documents.cache import LinkedCache
from sglang_ext.offline.executor import Probe, Work
from sglang_ext.plan import FillKind
from tests.documents.builders import document
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import executor, noise_maps, prompts

CLOSE = {"rtol": 0, "atol": 1e-3}
RANKED = ("random", "cache_blend", "a3")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request):
    return executor(request.param)


@pytest.fixture(scope="module")
def spans(model):
    """5 inline, 9, 4 inline, 14 (at 18), 6 inline: T = 38."""
    before, first, between, second, after = prompts((5, 9, 4, 14, 6))
    one, two = Compiler(model).compile([first, second])
    return [before, one, between, two, after]


def planned(model, spans, name, budget):
    cache = LinkedCache(model, link(spans))
    return cache, planner_named(name, budget)(cache.linked, cache).plan


def chosen(model, spans, name, budget) -> list[int]:
    """What a rule computes beyond the inline tokens."""
    _, plan = planned(model, spans, name, budget)
    return sorted(set(plan.compute.tolist()) - set(link(spans).plan.compute.tolist()))


@pytest.mark.parametrize("name", RANKED)
@pytest.mark.parametrize(("share", "count"), [(0.0, 0), (0.3, 6), (0.7, 16), (1.0, 23)])
def test_a_ranking_rule_computes_its_share_of_the_documents_tokens(model, spans, name, share, count):
    found = chosen(model, spans, name, share)
    assert len(found) == count
    assert set(found) <= set(link(spans).candidates.tolist())


def test_a_share_is_meant_in_decimal():
    """0.29 * 100 is 28.999999999999996 in binary."""
    linked = link([document(range(100)), [1]])
    evidence = SimpleNamespace(disagreement=torch.zeros(0, len(linked)))
    assert len(planner_named("random", 0.29)(linked, evidence).plan.compute) == 29 + 1


@pytest.mark.parametrize("name", RANKED)
def test_a_larger_budget_keeps_what_a_smaller_one_chose(model, spans, name):
    assert set(chosen(model, spans, name, 0.3)) <= set(chosen(model, spans, name, 0.7))


def test_epic_computes_the_first_tokens_of_each_document(model, spans):
    assert chosen(model, spans, "epic", 2) == [5, 6, 18, 19]
    assert chosen(model, spans, "epic", 100) == link(spans).candidates.tolist()


def test_epic_skips_a_header():
    linked = link([document([3, 4, 5], header=2, trailer=1), [1]])
    assert planner_named("epic", 1)(linked, None).plan.compute.tolist() == [2, 6]


def test_no_recompute_computes_inline_tokens_and_full_everything(model, spans):
    assert chosen(model, spans, "no_recompute", 0) == []
    assert chosen(model, spans, "full", 0) == link(spans).candidates.tolist()


def test_random_depends_on_its_seed_and_nothing_else(model, spans):
    assert chosen(model, spans, "random:1", 0.5) == chosen(model, spans, "random:1", 0.5)
    assert chosen(model, spans, "random:1", 0.5) != chosen(model, spans, "random:2", 0.5)


def test_the_deviation_is_what_a_full_prefill_changes_and_leaves_its_first_layers_native(model, spans):
    cache = LinkedCache(model, link(spans))
    filled = cache.row.keys[1].clone(), cache.row.values[1].clone()
    [native], _ = model.prefill([cache.linked.tokens.tolist()])
    found = cache.deviation(1)
    expected = sum((new[1] - old).square().sum((-1, -2)) for new, old in zip((native.keys, native.values), filled))
    own = cache.linked.candidates
    torch.testing.assert_close(found[own], expected[own], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(cache.row.keys[:2], native.keys[:2], **CLOSE)
    assert not torch.allclose(cache.row.values[2], native.values[2], atol=1e-2)


def test_cache_blend_takes_the_tokens_that_deviate_most(model, spans):
    cache = LinkedCache(model, link(spans))
    own = cache.linked.candidates
    ranked = own[cache.deviation(1)[own].argsort(descending=True)]
    assert chosen(model, spans, "cache_blend", 0.3) == sorted(ranked[:6].tolist())


def test_the_first_document_of_a_prompt_does_not_deviate(model):
    """Nothing stands before it, so that its KV is native already."""
    first, second, query = prompts((9, 8, 4))
    cache = LinkedCache(model, link([*Compiler(model).compile([first, second]), query]))
    found = cache.deviation(1)
    assert float(found[:9].max()) < 1e-6 < float(found[9:17].min())


def test_the_queries_attention_is_the_models_own_over_document_tokens_alone(model, spans):
    cache = LinkedCache(model, link(spans))
    query, own, probe = torch.tensor(cache.linked.query), cache.linked.candidates, Probe()
    found = cache.asked()
    model.compute([Work(cache.row, cache.linked.tokens[query], query)], probe, layers=1)
    among = attention_weights(probe.queries[0][0], query, cache.row.keys[0], probe.scale)[..., own]
    expected = (among / among.sum(-1, keepdim=True)).mean((0, 1))
    torch.testing.assert_close(found[own], expected, rtol=1e-3, atol=1e-5)
    assert float(found.sum()) == pytest.approx(float(found[own].sum())) == pytest.approx(1, abs=1e-4)


def test_asking_leaves_the_prefill_as_it_is(model, spans):
    asked, plain = LinkedCache(model, link(spans)), LinkedCache(model, link(spans))
    asked.asked()
    logits = [cache.prefill(planner_named("no_recompute", 0)) for cache in (asked, plain)]
    assert torch.equal(*logits)


def test_a_query_that_repeats_a_document_token_asks_for_it(model):
    """Layer 0 sees tokens alone: keys equal up to rotation attract the same share wherever the rest is equal."""
    first, query = prompts((9, 3))
    [one] = Compiler(model).compile([first])
    near, far = (LinkedCache(model, link([[7] * gap, one, query])) for gap in (1, 5))
    # The document keeps its distance to the query, so that relative positions, and with them the shares, are equal.
    torch.testing.assert_close(near.asked()[1:10], far.asked()[5:14], rtol=0, atol=1e-4)


def test_rank_disagreement_ranks_mapped_documents_by_their_maps(model):
    source = executor("qwen3", seed=7, layers=2, kv_heads=1)
    maps = noise_maps(source.geometry, model.geometry)
    first, second, query = prompts((9, 14, 6))
    linked = link([*Compiler(source).compile([first, second]), query], FillKind.MAPPED)
    cache = LinkedCache(model, linked, maps=maps)
    scores = cache.disagreement.sum(0)
    plan = planner_named("rank_disagreement", 0.3)(linked, cache).plan
    taken = [at for at in plan.compute.tolist() if at < 23]
    assert len(taken) == 6
    assert float(scores[taken].min()) >= float(scores[plan.filled].max())
    one = model.row(len(linked))
    outside = model.fill_mapped(one, linked.placed[1].document.block, maps, 9)
    torch.testing.assert_close(cache.disagreement[:, 9:23], outside)
    assert torch.equal(cache.row.keys[:, 9:23], one.keys[:, 9:23])


def test_layers_that_do_not_run_are_not_written(model):
    [ids] = prompts((8,))
    row = model.row(8)
    model.compute([Work(row, torch.tensor(ids), torch.arange(8))], layers=1)
    [native], _ = model.prefill([ids])
    assert torch.equal(row.keys[0], native.keys[0])
    assert not row.keys[1:].any()
    assert model.model.config.num_hidden_layers == model.geometry.layers


@pytest.mark.parametrize(
    ("name", "budget"), [("magic", 0.1), ("random:x", 0.1), ("a3", 1.5), ("epic", 1.5), ("epic", -1), ("random", -0.1)]
)
def test_unknown_rules_and_budgets_out_of_range_are_refused(name, budget):
    with pytest.raises(PlanError):
        planner_named(name, budget)


def test_every_name_gives_a_rule():
    for name in NAMES:
        assert callable(planner_named(name, 1.0))
