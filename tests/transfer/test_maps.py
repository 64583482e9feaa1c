"""Laws of the map and its score (section 3 and appendix A of the paper)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import PackError
from sglang_ext.phases import Phases
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap, SourceFeatures, energy_outside
from tests.kv.builders import laws, random, random_block
from tests.transfer.conftest import SOURCE, TARGET, random_map, random_maps, source_mean

WIDTH = TARGET.width
STRUCTURES = ("full", "head")
maps_ = st.builds(
    random_map, st.just((0, 2)), st.integers(1, WIDTH), st.integers(0, 99), st.just(torch.float32),
    st.sampled_from(STRUCTURES),
)  # fmt: skip


def dense(one: SideMap) -> torch.Tensor:
    """The [k * d_s, d_t] matrix of a map of either structure: a `head` map is a full one with zeros."""
    if one.structure == "full":
        return one.weight
    heads, inputs, outputs = one.weight.shape
    k, width = len(one.sources), inputs // len(one.sources)
    weight = one.weight.new_zeros(k, heads, width, heads, outputs)
    for head in range(heads):
        weight[:, head, :, head] = one.weight[head].view(k, width, outputs)
    return weight.view(k * heads * width, heads * outputs)


def equation_5(one, x: torch.Tensor) -> torch.Tensor:
    """||y-hat - y-hat^(r)||^2 from W_r = W P_r with its bias refit, in float64."""
    weight, bias, mean, basis = (t.double() for t in (dense(one), one.bias, one.input_mean, one.basis))
    full = x.double() @ weight + bias
    centre = mean @ weight + bias
    weight_r = weight @ basis @ basis.T
    bias_r = centre - mean @ weight_r
    return (full - (x.double() @ weight_r + bias_r)).square().sum(-1).float()


def z_of(one: SideMap, x: torch.Tensor) -> torch.Tensor:
    return one.project(x - one.input_mean)


@laws
@given(one=maps_, seed=st.integers(0, 99))
def test_the_score_is_the_gap_between_the_full_and_the_reduced_prediction(one, seed):
    x = random(seed, 7, 2 * SOURCE.width)
    torch.testing.assert_close(one.disagreement(z_of(one, x)), equation_5(one, x), rtol=1e-4, atol=1e-3)


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
    assert one.disagreement(z_of(one, random(seed, 5, 2 * SOURCE.width) * 100)).tolist() == [0.0] * 5


def test_a_prediction_inside_the_basis_scores_nothing_and_one_outside_all_of_it():
    one = random_map((0, 2), WIDTH, 0)
    inside, outside = one.basis[:, :3], one.basis[:, 3:]
    narrow = replace(one, basis=inside.contiguous())
    z = torch.stack([inside[:, 0] * 5, outside[:, 0] * 5])
    scores = narrow.disagreement(z)
    torch.testing.assert_close(scores, torch.tensor([0.0, 25.0]), rtol=1e-4, atol=1e-4)


@laws
@given(one=maps_, seed=st.integers(0, 99))
def test_the_score_does_not_depend_on_the_targets_means(one, seed):
    x = random(seed, 7, 2 * SOURCE.width)
    moved = replace(one, bias=one.bias + random(seed + 1, WIDTH) * 10)
    before, after = (m.disagreement(z_of(m, x)) for m in (one, moved))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


def test_the_mean_input_scores_nothing():
    one = random_map((0, 2), 3, 4)
    score = one.disagreement(z_of(one, one.input_mean[None]))
    torch.testing.assert_close(score, torch.zeros(1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_prediction_is_affine_and_float32(dtype, structure):
    one = random_map((0, 2), 3, 5, dtype, structure)
    one = replace(one, bias=one.bias + 1000)  # that a bias in bf16 could not hold
    x = random(6, 9, 2 * SOURCE.width)
    predicted = one.predict(x)
    assert predicted.dtype == torch.float32
    product = x.double() @ dense(one).double()
    rounding = 2**-7 if dtype == torch.bfloat16 else 1e-6
    atol = rounding * float(product.abs().max()) + 1e-4
    torch.testing.assert_close(predicted.double(), product + one.bias.double(), rtol=0, atol=atol)


def test_a_large_mean_costs_a_bfloat16_map_no_digits_of_the_score():
    """Centring comes before rounding: moving the features and their mean together changes nothing."""
    one = random_map((0, 2), 3, 5, torch.bfloat16)
    x = random(6, 9, 2 * SOURCE.width)
    far = replace(one, input_mean=one.input_mean + 4096)
    scores = [m.disagreement(m.project(((features - m.input_mean).to(torch.bfloat16)))) for m, features in ((one, x), (far, x + 4096))]
    torch.testing.assert_close(scores[1], scores[0], rtol=0.05, atol=0.05)


@laws
@given(chosen=st.sets(st.integers(0, 2), min_size=1), side=st.sampled_from(SIDES), length=st.integers(1, 6))
def test_features_are_the_chosen_layers_side_by_side_less_their_means(chosen, side, length):
    block = random_block(SOURCE, length)
    tensor = block.keys if side == "key" else block.values
    sources = tuple(sorted(chosen))
    explicit = torch.cat([tensor[layer].flatten(1) for layer in sources], dim=1) - source_mean(sources)
    maps = random_maps(sources)
    features = SourceFeatures(block, maps.source_means, torch.float32)
    assert torch.equal(features.of(side, sources), explicit)
    assert features.of(side, sources).shape == (length, len(sources) * SOURCE.width)


def run(maps: CrossModelMap, block):
    return list(maps.predict(block, Phases()))


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("sources", [(0, 2), (0, 1, 2), (1,)])
def test_each_layer_is_predicted_once_in_order(sources, structure):
    maps, block = random_maps(sources, structure=structure), random_block(SOURCE, 6)
    predictions = run(maps, block)
    assert [one.layer for one in predictions] == [0, 1]
    x = {
        "key": torch.cat([block.keys[s].flatten(1) for s in sources], 1),
        "value": torch.cat([block.values[s].flatten(1) for s in sources], 1),
    }
    for layer, keys, values, disagreement in predictions:
        y = {side: x[side] @ dense(maps.layers[layer][side]) + maps.layers[layer][side].bias for side in SIDES}
        torch.testing.assert_close(keys, y["key"], rtol=0, atol=1e-4)
        torch.testing.assert_close(values, y["value"], rtol=0, atol=1e-4)
        assert keys.dtype == values.dtype == disagreement.dtype == torch.float32
        expected = sum(equation_5(maps.layers[layer][side], x[side]) for side in SIDES)
        torch.testing.assert_close(disagreement, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_scores_belong_to_tokens(structure):
    maps, block = random_maps(structure=structure), random_block(SOURCE, 6)
    whole, part = run(maps, block), run(maps, block.span(2, 5))
    for one, other in zip(whole, part):
        torch.testing.assert_close(other.disagreement, one.disagreement[2:5], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.keys, one.keys[2:5], rtol=1e-5, atol=1e-5)


def test_a_block_without_tokens_predicts_nothing():
    for one in run(random_maps(), random_block(SOURCE, 4).span(0, 0)):
        assert one.keys.shape == one.values.shape == (0, WIDTH)
        assert one.disagreement.shape == (0,)


def test_predicting_counts_its_phases():
    phases = Phases()
    list(random_maps().predict(random_block(SOURCE, 4), phases))
    assert set(phases.ms) == {"gather", "map", "score"}


def test_another_step_may_stand_in():
    """It maps each side of each layer, in order, and adds both sides' scores up."""
    maps, seen = random_maps(), []

    def step(side, centred, scores, phases):
        seen.append(side)
        scores += len(seen)
        return torch.full((len(centred), WIDTH), float(len(seen)))

    one, other = maps.predict(random_block(SOURCE, 4), Phases(), step)
    assert [id(side) for side in seen] == [id(sides[name]) for sides in maps.layers for name in SIDES]
    assert [float(part[0, 0]) for layer in (one, other) for part in (layer.keys, layer.values)] == [1, 2, 3, 4]
    assert (one.disagreement.tolist(), other.disagreement.tolist()) == ([3.0] * 4, [7.0] * 4)


def test_predicting_leaves_the_block_as_it_is():
    block = random_block(SOURCE, 5)
    before = block.keys.clone(), block.values.clone()
    run(random_maps(), block)
    assert torch.equal(block.keys, before[0]) and torch.equal(block.values, before[1])


def test_maps_of_two_calibrations_are_refused():
    layers = random_maps().layers
    strange = replace(layers[1]["key"], input_mean=layers[1]["key"].input_mean + 1)
    with pytest.raises(PackError, match="layer 1, key: the mean of source layer 0"):
        run(CrossModelMap((layers[0], {**layers[1], "key": strange})), random_block(SOURCE, 4))
