"""The linear map from one model's KV to another's, and the score that says where not to trust it.

Section 3 of the RaReCache paper, with its letters: x is the concatenation of k source layers' entries
of one token and side, y-hat = xW + b the predicted target entry, V_r the first r eigenvectors of the
covariance of the predictions on the calibration set, z = (x - x-bar)W the centred prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Iterator, Literal, NamedTuple, Protocol

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import PackError
from sglang_ext.phases import Phases

SIDES = ("key", "value")
Structure = Literal["full", "head"]


@dataclass(frozen=True)
class SideMap:
    """The map of one target layer and side (equation 1) and its basis V_r.

    sources: the k source layers, ascending; weight: [k * d_s, d_t] (structure `full`) or, where target
    head h reads only source head h of those layers, [kv_heads, k * source head_dim, target head_dim]
    (structure `head`); bias: float32 [d_t]; input_mean: float32 [k * d_s], layer by layer in both
    structures; basis: float32 [d_t, r]. `weight` carries the pack's dtype; products accumulate in float32.
    """

    sources: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor
    input_mean: torch.Tensor
    basis: torch.Tensor

    @property
    def structure(self) -> Structure:
        return "full" if self.weight.dim() == 2 else "head"

    @cached_property
    def prediction_mean(self) -> torch.Tensor:
        """mu-hat = x-bar W + b (equation 3): float32 [d_t]."""
        return self._times(self.input_mean[None], self.weight.float())[0] + self.bias

    def project(self, centred: torch.Tensor) -> torch.Tensor:
        """z = (x - x-bar)W (equation 8) of centred features [T, k * d_s] in the weight's dtype: float32 [T, d_t].

        Centring comes before the rounding to bfloat16, so that a large mean costs the score no digits.
        """
        return self._times(centred, self.weight).float()

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """y-hat = xW + b for features [T, k * d_s]: float32 [T, d_t]."""
        centred = (features.float() - self.input_mean).to(self.weight.dtype)
        return self.project(centred) + self.prediction_mean

    def disagreement(self, z: torch.Tensor) -> torch.Tensor:
        """This map's share of s_i (equation 2) for its centred predictions [T, d_t]: float32 [T]."""
        return energy_outside(z, self.basis)

    def _times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dim() == 2:
            return x @ weight
        heads, inputs, _ = weight.shape
        k = len(self.sources)
        by_head = x.view(len(x), k, heads, inputs // k).permute(2, 0, 1, 3).reshape(heads, len(x), inputs)
        return (by_head @ weight).transpose(0, 1).flatten(1)


class MapStep(Protocol):
    """How `CrossModelMap.predict` maps one side of one target layer."""

    def __call__(self, side: SideMap, centred: torch.Tensor, scores: torch.Tensor, phases: Phases) -> torch.Tensor:
        """y-hat of centred features [T, k * d_s]: float32 [T, d_t]. Adds this side's share of s_i to `scores`,
        float32 [T], and the time it took to the phases `map` and `score`."""


def map_and_score(side: SideMap, centred: torch.Tensor, scores: torch.Tensor, phases: Phases) -> torch.Tensor:
    """The MapStep in torch."""
    with phases("map"):
        z = side.project(centred)
    with phases("score"):
        scores += side.disagreement(z)
    with phases("map"):
        return z.add_(side.prediction_mean)


def energy_outside(centred: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """||z||^2 - ||z V_r||^2 (equation 9) for z [T, d_t] and orthonormal V_r [d_t, r]: float32 [T].

    The squared distance between the full-rank and the rank-r prediction, never below 0, and exactly 0
    where V_r spans the whole space.
    """
    if basis.shape[1] == basis.shape[0]:
        return centred.new_zeros(len(centred))
    inside = centred @ basis
    return (centred.square().sum(-1) - inside.square().sum(-1)).clamp_min(0.0)


class SourceFeatures:
    """A source block centred and laid out for the maps, once per prompt, shared by all target layers.

    Appendix B.1: rebuilding de-rotated source blocks for every target layer cost more than the map.
    """

    def __init__(self, block: KVBlock, means: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        """means: per side float32 [layers up to the last one that is read, d_s] (CrossModelMap.source_means)."""
        # [T, layers, d_s]: any ascending choice of layers is then one gather, all of them a view.
        self._sides = {
            side: (tensor[: len(means[side])].flatten(2).transpose(0, 1).float() - means[side]).to(dtype).contiguous()
            for side, tensor in (("key", block.keys), ("value", block.values))
        }

    def of(self, side: str, sources: tuple[int, ...]) -> torch.Tensor:
        """x - x-bar of every token: [T, k * d_s]."""
        table = self._sides[side]
        if len(sources) == table.shape[1]:
            return table.flatten(1)
        return table[:, list(sources)].flatten(1)


class LayerPrediction(NamedTuple):
    """One target layer's predicted entries, free of position, and how far they are to be trusted.

    keys, values: float32 [T, d_t]; disagreement: float32 [T], this layer's share of s_i (both sides).
    """

    layer: int
    keys: torch.Tensor
    values: torch.Tensor
    disagreement: torch.Tensor


@dataclass(frozen=True)
class CrossModelMap:
    """All maps of a pack: `layers[l][side]` for target layer l."""

    layers: tuple[dict[str, SideMap], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0]["key"].weight.dtype

    @property
    def structure(self) -> Structure:
        return self.layers[0]["key"].structure

    @cached_property
    def source_means(self) -> dict[str, torch.Tensor]:
        """x-bar of each source layer, as far as one is read: per side float32 [layers, d_s].

        Raises PackError where two target layers were fitted to different means of one source layer.
        """
        return {side: self._means(side) for side in SIDES}

    def predict(self, block: KVBlock, phases: Phases, step: MapStep = map_and_score) -> Iterator[LayerPrediction]:
        """Each target layer in turn, for all tokens of a source block. Never holds more than one layer.

        Adds to the phases `gather` (centring and laying out the block), and what `step` adds: `map` and `score`.
        """
        with phases("gather"):
            features = SourceFeatures(block, self.source_means, self.dtype)
        for layer, sides in enumerate(self.layers):
            entries, disagreement = {}, torch.zeros(len(block), device=block.keys.device)
            for side, one in sides.items():
                with phases("map"):
                    centred = features.of(side, one.sources)
                entries[side] = step(one, centred, disagreement, phases)
            yield LayerPrediction(layer, entries["key"], entries["value"], disagreement)

    def _means(self, side: str) -> torch.Tensor:
        maps = [sides[side] for sides in self.layers]
        means: dict[int, torch.Tensor] = {}
        for layer, one in enumerate(maps):
            for source, mean in zip(one.sources, one.input_mean.view(len(one.sources), -1)):
                if not torch.equal(means.setdefault(source, mean), mean):
                    raise PackError(
                        f"target layer {layer}, {side}: the mean of source layer {source} is not the one that "
                        "another target layer was fitted to; all maps of a pack must come from one calibration"
                    )
        blank = torch.zeros_like(next(iter(means.values())))
        return torch.stack([means.get(source, blank) for source in range(max(means) + 1)])
