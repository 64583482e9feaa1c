"""Laws of the oracles: their scores are what their definitions give, and a case is not changed by being read."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.attention import LAST_QUERIES
from sglang_ext.offline.corpus import encode
from sglang_ext.offline.evaluate.arms import Arm, arms
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.oracles import LAYER_PREFIX, MAPPING_ERROR, TARGET_ATTENTION, mapping_error
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, Fraction
from tests.kv.models import random_model, tokenizer
from tests.offline.evaluate import stage


@pytest.fixture
def case(tmp_path):
    evaluation, _ = stage.run(tmp_path, [], stage.items(1))
    ids = encode(tokenizer(), stage.items(1)[0].record)
    natives, _ = stage.target().executor.prefill([ids])
    [case] = evaluation.cases(evaluation.pairs[0], [ids], natives, attention=True)
    return case


def test_mapping_error_is_relative_squared_and_free_of_position(case):
    n, ours = len(case.ids) - 1, stage.target().executor
    true = ours.block(case.native, case.ids[:-1])
    predicted = list(stage.pack().maps.predict(case.block, _phases()))
    for layer, found in zip(predicted, mapping_error(case)):
        k, v = true.keys[layer.layer].reshape(n, -1), true.values[layer.layer].reshape(n, -1)
        error = (layer.keys - k).square().sum(-1) + (layer.values - v).square().sum(-1)
        torch.testing.assert_close(found, error / (k.square().sum(-1) + v.square().sum(-1)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(case.scores(MAPPING_ERROR), mapping_error(case).mean(0))


def test_target_attention_is_the_targets_own(case):
    eager = random_model("qwen3", 1, layers=stage.LAYERS, vocabulary=len(tokenizer()))
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = eager(torch.tensor([case.ids]), output_attentions=True).attentions
    expected = weights[-1][0, :, -LAST_QUERIES:].mean((0, 1))[:-1]  # four layers: the last quarter is the last one
    torch.testing.assert_close(case.scores(TARGET_ATTENTION), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("rho", "layers"), [(0.0, 0), (0.25, 1), (0.3, 2), (0.75, 3), (1.0, 4)])
def test_layer_prefix_takes_whole_layers_from_the_target(case, rho, layers):
    row, plan = case.lifted_by_layers(rho, spare=2)
    n = len(case.ids) - 1
    assert plan.compute.tolist() == [n]
    for mine, native, mapped in zip(*[(one.keys, one.values) for one in (row, case.native, case.filled)]):
        assert mine[:layers, :n].equal(native[:layers, :n])
        assert mine[layers:, :n].equal(mapped[layers:, :n])


def test_layer_prefix_is_a_forward_that_starts_from_the_prompt(case):
    """All positions computed in the first layers only: what a forward over the whole prompt writes there."""
    ours = stage.target().executor
    row, plan = case.lifted_by_layers(0.5, spare=0)
    whole, _ = ours.prefill([case.ids])
    ours.run([row], [case.ids], [plan])
    torch.testing.assert_close(row.keys[:2], whole[0].keys[:2], rtol=0, atol=1e-3)
    assert not torch.allclose(row.keys[2:, :-1], whole[0].keys[2:, :-1], atol=1e-1)


def test_a_case_serves_arm_after_arm_unchanged(case):
    before = [t.clone() for t in (case.native.keys, case.filled.keys, case.filled.values)]
    ours = stage.target().executor
    for arm in (Arm(RANK_DISAGREEMENT, 0.5), Arm(TARGET_ATTENTION, 0.5), Arm(MAPPING_ERROR, 0.5)):
        row, plan = case.lifted(arm.selector, arm.budget, spare=4)
        ours.greedy([row], ours.run([row], [case.ids], [plan]), 4, [])
    case.lifted_by_layers(0.5, 4)
    after = (case.native.keys, case.filled.keys, case.filled.values)
    for one, other in zip(before, after):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_a_copy_holds_the_filled_positions_and_room(case):
    row, plan = case.lifted(RANK_DISAGREEMENT, Fraction(0.0), spare=5)
    n = len(case.ids)
    assert row.keys.shape[1] == n + 5
    assert row.keys[:, : n - 1].equal(case.filled.keys[:, : n - 1])
    assert plan.compute.tolist() == [n - 1]


def test_arms_are_named_once_and_measure_gaps_from_rho_zero():
    made = arms(["random", "random", "target_attention", LAYER_PREFIX], (0.3, 0.1), (0.3,), (0.5,), seeds=2)
    ranked = [arm.rho for arm in made if arm.selector == RANK_DISAGREEMENT and arm.coverage is None]
    assert ranked == [0.0, 0.1, 0.3]
    assert [arm.selector for arm in made if arm.rho == 0.3] == [
        RANK_DISAGREEMENT, "random:0", "random:1", "target_attention", LAYER_PREFIX,
    ]  # fmt: skip
    assert len(made) == len(set(made)) == 8


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"selector": "magic"}, "'magic' is not known; expected one of rank_disagreement"),
        ({"selector": RANK_DISAGREEMENT, "rho": 1.1}, "rho must lie in"),
        ({"selector": RANK_DISAGREEMENT, "coverage": -0.1}, "coverage must lie in"),
        ({"selector": "random", "coverage": 0.5}, "random takes a rho"),
    ],
)
def test_an_arm_that_cannot_run_is_refused(fields, reason):
    with pytest.raises(EvaluationError, match=reason):
        Arm(**fields)


def _phases():
    from sglang_ext.phases import Phases

    return Phases()
