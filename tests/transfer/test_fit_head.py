"""Laws of structure `head`: one ridge regression per head, and otherwise a full map with zeros."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.transfer.fit import Fit, MapFitter
from sglang_ext.transfer.maps import SIDES, SideMap
from tests.kv.builders import geometry, identity, random, random_block
from tests.transfer.conftest import SOURCE, TARGET

TOKENS = 160
HEADS = 2
HEADED = geometry(layers=3, query_heads=4, kv_heads=HEADS, head_dim=6)  # d_s = 12; TARGET: 2 heads of 4
PLANTED = {(0, "key"): (0, 2), (0, "value"): (1, 2), (1, "key"): (0, 1), (1, "value"): (0, 2)}


def of_head(block: KVBlock, side: str, layers: tuple[int, ...], head: int) -> torch.Tensor:
    """One head's entries of some layers, layer by layer: float64 [T, layers * head_dim]."""
    tensor = block.keys if side == "key" else block.values
    return torch.cat([tensor[layer][:, head] for layer in layers], 1).double()


def dense(one: SideMap) -> torch.Tensor:
    """The [k * d_s, d_t] weight, rows layer by layer, that a `head` map stands for."""
    if one.structure == "full":
        return one.weight
    k, width = len(one.sources), HEADED.head_dim
    found = torch.zeros(k, HEADS, width, HEADS, TARGET.head_dim)
    for head in range(HEADS):
        found[:, head, :, head] = one.weight[head].float().view(k, width, TARGET.head_dim)
    return found.view(k * HEADS * width, HEADS * TARGET.head_dim)


class Planted:
    """A source, and a target whose heads are affine functions of the same heads of two source layers.

    With `noise`, of all heads and of noise, so that no map is exact.
    """

    def __init__(self, noise: float = 0.0) -> None:
        self.source = random_block(HEADED, TOKENS, 0)
        self.source.keys[2] += 3.0
        sides: dict[str, list[torch.Tensor]] = {side: [] for side in SIDES}
        for number, ((_, side), layers) in enumerate(PLANTED.items()):
            heads = []
            for head in range(HEADS):
                x = of_head(self.source, side, layers, head).float()
                bias = 5 * random(100 + number, TARGET.head_dim)
                y = x @ random(10 * number + head, x.shape[1], TARGET.head_dim) + bias
                other = of_head(self.source, side, layers, 1 - head).float()
                blurred = other @ random(200 + number, x.shape[1], TARGET.head_dim) + random(300 + number, *y.shape)
                heads.append(y + noise * blurred)
            sides[side].append(torch.stack(heads, 1))
        self.target = KVBlock(
            self.source.tokens, torch.stack(sides["key"]), torch.stack(sides["value"]), TARGET, identity("t")
        )

    def solve(self, structure: str, k: int = 2, rank: int = 3, ridge: float = 1e-8, dtype=torch.float32) -> Fit:
        made = MapFitter(HEADED, TARGET)
        made.add(self.source, self.target, torch.arange(TOKENS))
        return made.solve(k, rank, ridge, dtype, structure)


@pytest.fixture(scope="module")
def planted():
    return Planted()


@pytest.fixture(scope="module")
def noisy():
    return Planted(noise=0.5)


def maps_of(fit: Fit):
    for layer in range(TARGET.layers):
        for side in SIDES:
            yield layer, side, fit.maps.layers[layer][side]


def test_the_maps_are_of_the_structure_asked_for(noisy):
    for structure in ("full", "head"):
        fit = noisy.solve(structure)
        assert fit.maps.structure == structure
        for _, _, one in maps_of(fit):
            assert one.structure == structure
            if structure == "head":
                assert one.weight.shape == (HEADS, 2 * HEADED.head_dim, TARGET.head_dim)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("ridge", [0.01, 5.0])
def test_each_head_is_a_ridge_regression_of_its_own(noisy, k, ridge):
    for layer, side, one in maps_of(noisy.solve("head", k=k, ridge=ridge)):
        for head in range(HEADS):
            x, y = (of_head(noisy.source, side, one.sources, head), of_head(noisy.target, side, (layer,), head))
            x, y = x - x.mean(0), y - y.mean(0)
            alone = torch.linalg.solve(x.T @ x + ridge * torch.eye(x.shape[1]).double(), x.T @ y)
            torch.testing.assert_close(one.weight[head].double(), alone, rtol=0, atol=1e-5)


def test_where_the_truth_is_head_by_head_both_structures_find_it(planted):
    full, head = planted.solve("full"), planted.solve("head")
    for layer, side, one in maps_of(head):
        other = full.maps.layers[layer][side]
        assert one.sources == other.sources == PLANTED[layer, side]
        torch.testing.assert_close(dense(one), other.weight, rtol=0, atol=1e-4)
        torch.testing.assert_close(one.bias, other.bias, rtol=0, atol=1e-3)
        assert head.records[layer][side].r2 == pytest.approx(1.0, abs=1e-6)


def test_heads_that_read_each_other_are_explained_better_by_a_full_map(noisy):
    full, head = noisy.solve("full"), noisy.solve("head")
    for layer, side, _ in maps_of(head):
        assert 0.3 < head.records[layer][side].r2 < full.records[layer][side].r2 - 0.01


def test_one_head_alone_is_the_full_map(noisy):
    """With one KV head on either side the two structures are the same regression."""
    source, target = geometry(3, 2, 1, 8), geometry(2, 2, 1, 4)
    blocks = random_block(source, 80, 1), random_block(target, 80, 9, "t")
    made = MapFitter(source, target)
    made.add(*blocks, torch.arange(80))
    full, head = (made.solve(2, 3, 0.01, torch.float32, structure) for structure in ("full", "head"))
    assert head.maps.structure == "head" and head.records == full.records
    for layer in range(2):
        for side in SIDES:
            one, other = head.maps.layers[layer][side], full.maps.layers[layer][side]
            assert torch.equal(one.weight[0], other.weight)
            assert torch.equal(one.basis, other.basis) and torch.equal(one.bias, other.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_mean_basis_and_r2_are_those_of_the_full_map_with_zeros(noisy, dtype):
    fit = noisy.solve("head", rank=3, dtype=dtype)
    for layer, side, one in maps_of(fit):
        assert one.weight.dtype == dtype and one.bias.dtype == one.input_mean.dtype == one.basis.dtype == torch.float32
        ours, theirs = (block.keys if side == "key" else block.values for block in (noisy.source, noisy.target))
        x = torch.cat([ours[source].flatten(1) for source in one.sources], 1).double()
        y = theirs[layer].flatten(1).double()
        predicted = x @ dense(one).double() + one.bias.double()
        torch.testing.assert_close(one.input_mean.double(), x.mean(0), rtol=0, atol=1e-5)
        torch.testing.assert_close(predicted.mean(0), y.mean(0), rtol=0, atol=1e-4)
        explained = 1 - float((y - predicted).square().sum() / (y - y.mean(0)).square().sum())
        assert fit.records[layer][side].r2 == pytest.approx(explained, abs=1e-5)
        z = predicted - predicted.mean(0)
        variances = (z @ one.basis.double()).square().mean(0)
        torch.testing.assert_close(variances, torch.linalg.eigvalsh(z.T @ z / TOKENS).flip(0)[:3], rtol=1e-4, atol=1e-6)


def test_the_sources_are_chosen_by_maps_of_the_same_structure():
    """Source layer 0 holds the target's entries under the other head, layer 1 under the same, blurred."""
    source = random_block(geometry(2, 4, 2, 4), TOKENS, 3)
    blur = 0.5 * random(50, 2, TOKENS, 4)
    for tensor in (source.keys, source.values):
        tensor[1] = tensor[0].flip(1) + blur.transpose(0, 1)
    target = KVBlock(
        source.tokens, source.keys[0].flip(1).expand(2, -1, -1, -1).clone(),
        source.values[0].flip(1).expand(2, -1, -1, -1).clone(), TARGET, identity("t"),
    )  # fmt: skip
    made = MapFitter(source.geometry, TARGET)
    made.add(source, target, torch.arange(TOKENS))
    chosen = {s: made.solve(1, 3, 0.01, torch.float32, s).maps.layers[0]["key"].sources for s in ("full", "head")}
    assert chosen == {"full": (0,), "head": (1,)}


def test_unequal_head_counts_are_refused_with_both_named():
    made = MapFitter(SOURCE, TARGET)
    made.add(random_block(SOURCE, 40), random_block(TARGET, 40, 1, "t"), torch.arange(40))
    with pytest.raises(CalibrationError, match="source has 1 KV heads and the target 2; use structure `full`"):
        made.solve(2, 3, 0.01, torch.float32, "head")
    assert made.solve(2, 3, 0.01, torch.float32, "full").records


def test_a_head_needs_tokens_for_its_own_features_only():
    made = MapFitter(HEADED, TARGET)
    made.add(random_block(HEADED, 12), random_block(TARGET, 12, 1, "t"), torch.arange(12))
    assert made.solve(2, 3, 0.01, torch.float32, "head").records
    with pytest.raises(CalibrationError, match="12 calibration tokens.*24 features"):
        made.solve(2, 3, 0.01, torch.float32, "full")
    with pytest.raises(CalibrationError, match="12 calibration tokens.*18 features"):
        made.solve(3, 3, 0.01, torch.float32, "head")


def test_solving_for_one_structure_leaves_the_moments_for_the_next(noisy):
    made = MapFitter(HEADED, TARGET)
    made.add(noisy.source, noisy.target, torch.arange(TOKENS))
    first, other, again = (made.solve(2, 3, 0.01, torch.float32, s) for s in ("full", "head", "full"))
    assert first.records == again.records != other.records
    assert torch.equal(first.maps.layers[1]["key"].weight, again.maps.layers[1]["key"].weight)


def test_every_head_has_its_say_in_the_choice_of_sources():
    """Source layer 0 holds the first head to the bit and nothing of the second, layer 1 both, blurred."""
    target = random_block(TARGET, TOKENS, 5, "t")
    source = random_block(geometry(2, 4, 2, 4), TOKENS, 3)
    for ours, theirs in ((source.keys, target.keys), (source.values, target.values)):
        ours[0, :, 0] = theirs[0, :, 0]
        ours[1] = theirs[0] + 0.3 * random(7, *theirs[0].shape)
    made = MapFitter(source.geometry, TARGET)
    made.add(source, target, torch.arange(TOKENS))
    assert made.solve(1, 3, 0.01, torch.float32, "head").maps.layers[0]["key"].sources == (1,)
