"""Laws of the fit: closed form, one pass, any order, and the paper's choice of layers and basis."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.transfer.fit import HeldOut, MapFitter, entries, held_out
from sglang_ext.transfer.maps import SIDES
from tests.kv.builders import identity, random, random_block
from tests.transfer.conftest import SOURCE, TARGET

TOKENS = 120
PLANTED = {(0, "key"): (0, 2), (0, "value"): (1, 2), (1, "key"): (0, 1), (1, "value"): (0, 2)}


def of_layers(block: KVBlock, side: str, layers: tuple[int, ...]) -> torch.Tensor:
    tensor = block.keys if side == "key" else block.values
    return torch.cat([tensor[layer].flatten(1) for layer in layers], 1)


class Planted:
    """A source block, and a target block that is an affine function of two of its layers."""

    def __init__(self, noise: float = 0.0, seed: int = 0) -> None:
        self.source = random_block(SOURCE, TOKENS, seed)
        # One layer's mean far from zero: a fit that forgets to centre cannot be right.
        self.source.keys[2] += 3.0
        self.weights, self.biases, sides = {}, {}, {side: [] for side in SIDES}
        for number, ((layer, side), layers) in enumerate(PLANTED.items()):
            weight, bias = random(number + 50, 2 * SOURCE.width, TARGET.width), random(number + 70, TARGET.width) * 4
            self.weights[layer, side], self.biases[layer, side] = weight, bias
            y = of_layers(self.source, side, layers) @ weight + bias
            sides[side].append((y + noise * random(number + 90, *y.shape)).view(TOKENS, TARGET.kv_heads, -1))
        keys, values = (torch.stack(sides[side]) for side in SIDES)
        self.target = KVBlock(self.source.tokens, keys, values, TARGET, identity("t"))

    def fitter(self) -> MapFitter:
        made = MapFitter(SOURCE, TARGET)
        made.add(self.source, self.target, torch.arange(TOKENS))
        return made

    def solve(self, k: int = 2, rank: int = 3, ridge: float = 1e-8, dtype=torch.float32):
        return self.fitter().solve(k, rank, ridge, dtype)


@pytest.fixture(scope="module")
def planted():
    return Planted()


@pytest.fixture(scope="module")
def noisy():
    return Planted(noise=1.0)


def test_a_planted_relation_is_recovered(planted):
    fit = planted.solve()
    for (layer, side), weight in planted.weights.items():
        one = fit.maps.layers[layer][side]
        torch.testing.assert_close(one.weight, weight, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.bias, planted.biases[layer, side], rtol=0, atol=1e-3)
        assert fit.records[layer][side].r2 == pytest.approx(1.0, abs=1e-6)


def test_the_layers_that_explain_most_are_the_sources(planted):
    fit = planted.solve()
    for (layer, side), sources in PLANTED.items():
        assert fit.maps.layers[layer][side].sources == fit.records[layer][side].sources == sources


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("ridge", [0.01, 5.0])
def test_the_normal_equations_of_ridge_hold(noisy, k, ridge):
    fit = noisy.solve(k=k, ridge=ridge)
    for layer in range(TARGET.layers):
        for side in SIDES:
            one = fit.maps.layers[layer][side]
            x = of_layers(noisy.source, side, one.sources).double()
            y = of_layers(noisy.target, side, (layer,)).double()
            x, y_centred, mean = x - x.mean(0), y - y.mean(0), x.mean(0)
            weight = one.weight.double()
            left = x.T @ x @ weight + ridge * weight
            torch.testing.assert_close(left, x.T @ y_centred, rtol=0, atol=1e-3)
            torch.testing.assert_close(one.input_mean.double(), mean, rtol=0, atol=1e-6)
            torch.testing.assert_close(one.prediction_mean.double(), y.mean(0), rtol=0, atol=1e-5)


def test_r2_is_the_explained_variance_of_the_stored_map(noisy):
    fit = noisy.solve(dtype=torch.bfloat16)
    for layer in range(TARGET.layers):
        for side in SIDES:
            one = fit.maps.layers[layer][side]
            x = of_layers(noisy.source, side, one.sources).double()
            y = of_layers(noisy.target, side, (layer,)).double()
            error = (y - x @ one.weight.double() - one.bias.double()).square().sum()
            explained = 1 - float(error / (y - y.mean(0)).square().sum())
            assert fit.records[layer][side].r2 == pytest.approx(explained, abs=1e-6)
            assert 0.5 < explained < 0.999


def test_only_the_given_rows_are_fitted(noisy):
    rows = torch.arange(1, TOKENS, 2)
    some = MapFitter(SOURCE, TARGET)
    some.add(noisy.source, noisy.target, rows)
    alone = MapFitter(SOURCE, TARGET)
    for row in rows.tolist():
        one = slice(row, row + 1)
        alone.add(noisy.source.span(one.start, one.stop), noisy.target.span(one.start, one.stop), torch.tensor([0]))
    assert some.count == alone.count == TOKENS // 2
    one, other = (f.solve(2, 3, 0.01, torch.float32).maps.layers[1]["key"] for f in (some, alone))
    torch.testing.assert_close(one.weight, other.weight, rtol=0, atol=1e-6)


def test_entries_are_tokens_by_layers(noisy):
    for side in SIDES:
        assert torch.equal(entries(noisy.source, side), of_layers(noisy.source, side, (0, 1, 2)))


@pytest.mark.parametrize("rank", [1, 3, TARGET.width])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_basis_holds_the_directions_of_largest_variance_in_order(noisy, rank, dtype):
    fit = noisy.solve(rank=rank, dtype=dtype)
    for layer in range(TARGET.layers):
        for side in SIDES:
            one = fit.maps.layers[layer][side]
            basis = one.basis.double()
            assert basis.shape == (TARGET.width, rank)
            torch.testing.assert_close(basis.T @ basis, torch.eye(rank).double(), rtol=0, atol=1e-5)
            x = of_layers(noisy.source, side, one.sources).double()
            z = (x - x.mean(0)) @ one.weight.double()
            variances = (z @ basis).square().mean(0)
            largest = torch.linalg.eigvalsh(z.T @ z / TOKENS).flip(0)[:rank]
            torch.testing.assert_close(variances, largest, rtol=1e-4, atol=1e-6)


def test_the_bias_belongs_to_the_weight_as_it_is_stored(noisy):
    fit = noisy.solve(dtype=torch.bfloat16)
    exact = noisy.solve()
    for layer in range(TARGET.layers):
        for side in SIDES:
            one = fit.maps.layers[layer][side]
            assert one.weight.dtype == torch.bfloat16 and one.bias.dtype == one.basis.dtype == torch.float32
            assert torch.equal(one.weight, exact.maps.layers[layer][side].weight.bfloat16())
            y = of_layers(noisy.target, side, (layer,))
            torch.testing.assert_close(one.prediction_mean, y.mean(0), rtol=0, atol=1e-5)
            x = of_layers(noisy.source, side, one.sources)
            torch.testing.assert_close((x @ one.weight.float() + one.bias).mean(0), y.mean(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 4}, "k = 4.*source has 3"),
        ({"k": 0}, "k = 0"),
        ({"rank": TARGET.width + 1}, "rank 9.*d_t = 8"),
        ({"rank": 0}, "rank 0"),
    ],
)
def test_settings_that_cannot_give_a_map_are_named(planted, settings, message):
    with pytest.raises(CalibrationError, match=message):
        planted.solve(**settings)


def test_too_few_tokens_are_counted(planted):
    few = MapFitter(SOURCE, TARGET)
    few.add(planted.source, planted.target, torch.arange(7))
    with pytest.raises(CalibrationError, match="7 calibration tokens.*8 features"):
        few.solve(2, 3, 0.01, torch.float32)
    assert few.solve(1, 3, 0.01, torch.float32).records


@pytest.mark.parametrize("ridge", [0.0, -1e9])
def test_a_ridge_that_cannot_be_solved_is_an_error_of_calibration(planted, ridge):
    twin = replace(planted.source, keys=planted.source.keys[:1].expand(3, -1, -1, -1).clone())
    made = MapFitter(SOURCE, TARGET)
    made.add(twin, planted.target, torch.arange(TOKENS))
    with pytest.raises(CalibrationError, match="ridge"):
        made.solve(3, 3, ridge, torch.float32)


def test_held_out_r2_is_measured_on_the_held_out_tokens(noisy):
    fit = noisy.solve()
    assert all(one.r2_held_out is None for sides in fit.records for one in sides.values())
    fresh = Planted(noise=1.0, seed=500)
    moments = HeldOut(fit.maps)
    for start, stop in ((0, 50), (50, 51), (51, TOKENS)):
        moments.add(fresh.source.span(start, stop), fresh.target.span(start, stop))
    measured = held_out(fit, moments)
    for layer in range(TARGET.layers):
        for side in SIDES:
            one = fit.maps.layers[layer][side]
            x, y = of_layers(fresh.source, side, one.sources), of_layers(fresh.target, side, (layer,))
            error = (y - one.predict(x)).square().sum()
            expected = 1 - float(error / (y - y.mean(0)).square().sum())
            record = measured.records[layer][side]
            assert record.r2_held_out == pytest.approx(expected, abs=1e-4)
            assert record.r2 == fit.records[layer][side].r2


def test_a_map_of_noise_explains_nothing_that_was_held_out(noisy):
    fit = noisy.solve()
    stranger = HeldOut(fit.maps)
    stranger.add(noisy.source, replace(noisy.target, keys=random(7, *noisy.target.keys.shape)))
    assert stranger.r2(0, "key") < 0
