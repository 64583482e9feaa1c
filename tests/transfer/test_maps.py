"""Laws of the map and its score (section 3 and appendix A of the paper)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SourceFeatures, energy_outside
from tests.kv.builders import geometry, laws, random, random_block
from tests.transfer.conftest import SOURCE, TARGET, random_map, random_maps

WIDTH = TARGET.width
maps_ = st.builds(random_map, st.just((0, 2)), st.integers(1, WIDTH), st.integers(0, 99))


def equation_5(one, x: torch.Tensor) -> torch.Tensor:
    """||y-hat - y-hat^(r)||^2 from W_r = W P_r with its bias refit, in float64."""
    weight, bias, mean, basis = (t.double() for t in (one.weight, one.bias, one.input_mean, one.basis))
    full = x.double() @ weight + bias
    centre = mean @ weight + bias
    weight_r = weight @ basis @ basis.T
    bias_r = centre - mean @ weight_r
    return (full - (x.double() @ weight_r + bias_r)).square().sum(-1).float()


@laws
@given(one=maps_, seed=st.integers(0, 99))
def test_the_score_is_the_gap_between_the_full_and_the_reduced_prediction(one, seed):
    x = random(seed, 7, 2 * SOURCE.width)
    torch.testing.assert_close(one.disagreement(one.predict(x)), equation_5(one, x), rtol=1e-4, atol=1e-3)


@laws
@given(one=maps_, seed=st.integers(0, 99))
def test_the_cheap_form_is_the_energy_outside_the_basis(one, seed):
    z = random(seed, 7, WIDTH)
    whole, basis = z.double(), one.basis.double()
    rest = whole - whole @ basis @ basis.T
    torch.testing.assert_close(energy_outside(z, one.basis), rest.square().sum(-1).float(), rtol=1e-4, atol=1e-4)


@laws
@given(one=maps_, seed=st.integers(0, 99), size=st.sampled_from([1e-3, 1.0, 1e3]))
def test_the_score_is_never_negative_and_falls_with_the_rank(one, seed, size):
    z = random(seed, 7, WIDTH) * size
    inside = random(seed, 50, one.basis.shape[1]) @ one.basis.T * size  # where rounding may go below zero
    assert bool((energy_outside(inside, one.basis) >= 0).all())
    scores = [energy_outside(z, one.basis[:, :rank]) for rank in range(1, one.basis.shape[1] + 1)]
    assert all(bool((score >= 0).all()) for score in scores)
    assert all(bool((low <= high + 1e-5 * size**2).all()) for high, low in zip(scores, scores[1:]))


@given(seed=st.integers(0, 99))
@laws
def test_the_score_is_exactly_zero_at_full_rank(seed):
    one = random_map((0, 2), WIDTH, seed)
    assert one.disagreement(one.predict(random(seed, 5, 2 * SOURCE.width) * 100)).tolist() == [0.0] * 5


def test_a_prediction_inside_the_basis_scores_nothing_and_one_outside_all_of_it():
    one = random_map((0, 2), WIDTH, 0)
    inside, outside = one.basis[:, :3], one.basis[:, 3:]
    narrow = replace(one, basis=inside.contiguous())
    z = torch.stack([inside[:, 0] * 5, outside[:, 0] * 5])
    scores = narrow.disagreement(z + narrow.prediction_mean)
    torch.testing.assert_close(scores, torch.tensor([0.0, 25.0]), rtol=1e-4, atol=1e-4)


@laws
@given(one=maps_, seed=st.integers(0, 99))
def test_the_score_does_not_depend_on_the_targets_means(one, seed):
    x = random(seed, 7, 2 * SOURCE.width)
    moved = replace(one, bias=one.bias + random(seed + 1, WIDTH) * 10)
    before, after = (m.disagreement(m.predict(x)) for m in (one, moved))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_the_mean_input_scores_nothing():
    one = random_map((0, 2), 3, 4)
    score = one.disagreement(one.predict(one.input_mean[None]))
    torch.testing.assert_close(score, torch.zeros(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prediction_is_affine_and_float32(dtype):
    one = random_map((0, 2), 3, 5, dtype)
    one = replace(one, bias=one.bias + 1000)  # that a bias in bf16 could not hold
    x = random(6, 9, 2 * SOURCE.width)
    predicted = one.predict(x)
    assert predicted.dtype == torch.float32
    product = x.to(dtype).double() @ one.weight.double()
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    atol = rounding * float(product.abs().max()) + 1e-4
    torch.testing.assert_close(predicted.double(), product + one.bias.double(), rtol=0, atol=atol)


@laws
@given(chosen=st.sets(st.integers(0, 2), min_size=1), side=st.sampled_from(SIDES), length=st.integers(1, 6))
def test_features_are_the_chosen_layers_side_by_side(chosen, side, length):
    block = random_block(SOURCE, length)
    tensor = block.keys if side == "key" else block.values
    sources = tuple(sorted(chosen))
    explicit = torch.cat([tensor[layer].flatten(1) for layer in sources], dim=1)
    features = SourceFeatures(block, torch.float32)
    assert torch.equal(features.of(side, sources), explicit)
    assert features.of(side, sources).shape == (length, len(sources) * SOURCE.width)


def run(maps: CrossModelMap, block, start: int, rotation: Rotation, phases: Phases):
    calls = []
    scores = maps.fill(block, start, TARGET, rotation, lambda *call: calls.append(call), phases)
    return scores, calls


@pytest.mark.parametrize("sources", [(0, 2), (0, 1, 2), (1,)])
@pytest.mark.parametrize("start", [0, 300])
def test_fill_writes_each_layer_once_in_order_with_keys_at_their_positions(sources, start):
    maps, block, rotation = random_maps(sources), random_block(SOURCE, 6), Rotation(TARGET.rope)
    scores, calls = run(maps, block, start, rotation, Phases())
    assert [layer for layer, _, _ in calls] == [0, 1]
    expected = torch.zeros(6)
    for layer, keys, values in calls:
        x = {
            "key": torch.cat([block.keys[s].flatten(1) for s in sources], 1),
            "value": torch.cat([block.values[s].flatten(1) for s in sources], 1),
        }
        y = {side: x[side] @ maps.layers[layer][side].weight + maps.layers[layer][side].bias for side in SIDES}
        positions = torch.arange(start, start + 6)
        torch.testing.assert_close(keys, rotation.rotate(y["key"].view(6, 2, 4), positions), rtol=0, atol=1e-5)
        torch.testing.assert_close(values, y["value"].view(6, 2, 4), rtol=0, atol=1e-5)
        assert keys.dtype == values.dtype == torch.float32
        expected += sum(equation_5(maps.layers[layer][side], x[side]) for side in SIDES)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)


def test_scores_belong_to_tokens_and_not_to_positions():
    maps, block, rotation = random_maps(), random_block(SOURCE, 6), Rotation(TARGET.rope)
    whole, _ = run(maps, block, 0, rotation, Phases())
    moved, _ = run(maps, block, 5000, rotation, Phases())
    part, _ = run(maps, block.span(2, 5), 0, rotation, Phases())
    assert torch.equal(whole, moved)
    torch.testing.assert_close(part, whole[2:5], rtol=1e-5, atol=1e-5)


def test_a_block_without_tokens_fills_nothing():
    scores, calls = run(random_maps(), random_block(SOURCE, 4).span(0, 0), 0, Rotation(TARGET.rope), Phases())
    assert scores.shape == (0,)
    assert all(keys.shape == values.shape == (0, 2, 4) for _, keys, values in calls)


def test_fill_counts_its_three_phases():
    phases = Phases()
    run(random_maps(), random_block(SOURCE, 4), 0, Rotation(TARGET.rope), phases)
    assert set(phases.ms) == {"map", "score", "write"}


def test_fill_leaves_the_block_as_it_is():
    block = random_block(SOURCE, 5)
    before = block.keys.clone(), block.values.clone()
    run(random_maps(), block, 3, Rotation(TARGET.rope), Phases())
    assert torch.equal(block.keys, before[0]) and torch.equal(block.values, before[1])


def test_rotation_of_the_target_is_used_and_not_that_of_the_source():
    scaled = geometry(layers=2, kv_heads=2, head_dim=4)
    rotation = Rotation(replace(scaled.rope, kind="linear", factor=7.0))
    maps, block = random_maps(), random_block(SOURCE, 4)
    _, plain = run(maps, block, 50, Rotation(TARGET.rope), Phases())
    _, linear = run(maps, block, 50, rotation, Phases())
    for (_, one, same), (_, other, values) in zip(plain, linear):
        assert torch.equal(same, values)
        assert not torch.allclose(one, other, atol=1e-2)
        positions = torch.arange(50, 54)
        back = Rotation(TARGET.rope).unrotate(one, positions)
        torch.testing.assert_close(rotation.unrotate(other, positions), back, rtol=0, atol=1e-5)
