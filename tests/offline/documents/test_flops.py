"""Operations are counted as the paper says: what is done online, and nothing of what was compiled before."""

from __future__ import annotations

import pytest

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.link import link
from sglang_ext.documents.planners import planner_named
from sglang_ext.offline.documents.cache import LinkedCache
from sglang_ext.offline.documents.flops import OnlineFlops
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import executor, noise_maps, prompts


@pytest.fixture(scope="module")
def model():
    return executor("qwen3")


def planned(model, lengths, name="no_recompute", budget=0.0):
    before, text, query = prompts(lengths)
    cache = LinkedCache(model, link([before, *Compiler(model).compile([text]), query]))
    return planner_named(name, budget)(cache.linked, cache)


def count(model, *lengths, name="no_recompute", budget=0.0, maps=None):
    return OnlineFlops.of(model, maps).count(planned(model, lengths, name, budget), name)


def test_a_prompt_without_documents_is_the_body_attention_and_head(model):
    body = 3 * (32 * 64 + 2 * 32 * 32 + 64 * 32 + 3 * 32 * 48)
    pairs = sum(range(1, 31))
    expected = 2 * body * 30 + 4 * 3 * 4 * 16 * pairs + 2 * 32 * 96
    assert OnlineFlops.of(model, None).count(link([prompts((30,))[0]]), "full") == expected


def test_moving_is_counted_for_each_entry_that_is_linked(model):
    """One more document token: its move, and one more key for each of the query's tokens."""
    more = count(model, 5, 21, 6) - count(model, 5, 20, 6)
    assert more == 3 * 16 * 2 * 3 + 4 * 3 * 4 * 16 * 6


@pytest.mark.parametrize("name", ["random", "cache_blend", "a3"])
def test_a_larger_budget_costs_more(model, name):
    found = [count(model, 5, 40, 6, name=name, budget=share) for share in (0.1, 0.5, 0.9)]
    assert found == sorted(found) and len(set(found)) == 3


def test_on_one_plan_the_rules_differ_by_their_scoring(model):
    linked, flops = planned(model, (5, 40, 6), "random", 0.3), OnlineFlops.of(model, None)
    random, a3, blend = (flops.count(linked, name) for name in ("random", "a3", "cache_blend"))
    assert a3 - random == 4 * 6 * 40 * (2 * 16 + 5)
    assert blend > a3


def test_cache_blend_runs_two_layers_of_three_for_every_token_and_compares_the_documents(model):
    linked, flops = planned(model, (5, 40, 6)), OnlineFlops.of(model, None)
    nothing, everything = flops.count(linked, "random"), count(model, 5, 40, 6, name="full")
    compared = 6 * 2 * 16 * 40
    assert flops.count(linked, "cache_blend") - nothing == pytest.approx(
        2 / 3 * (everything - nothing) + compared, abs=1
    )
    assert count(model, 5, 40, 6, name="cache_blend", budget=1.0) - everything == compared


def test_a_map_is_counted_for_each_entry(model):
    source = executor("qwen3", seed=7, layers=2, kv_heads=1)
    maps = noise_maps(source.geometry, model.geometry)
    weights = 2 * 3 * (2 * 16 * 32 + 32 * 4)  # sides, layers, weight and basis
    assert count(model, 5, 40, 6, maps=maps) - count(model, 5, 40, 6) == 2 * weights * 40
