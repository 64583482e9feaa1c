"""The linear map from one model's KV to another's, and the score that says where not to trust it.

Section 3 of the RaReCache paper, with its letters: x is the concatenation of k source layers' entries
of one token and side, y-hat = xW + b the predicted target entry, V_r the first r eigenvectors of the
covariance of the predictions on the calibration set.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Callable

import torch

from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.phases import Phases
from sglang_ext.rope import Rotation

SIDES = ("key", "value")


@dataclass(frozen=True)
class SideMap:
    """The map of one target layer and side (equation 1) and its basis V_r.

    sources: the k source layers, ascending; weight: [k * d_s, d_t]; bias: float32 [d_t]; input_mean:
    float32 [k * d_s]; basis: float32 [d_t, r]. `weight` carries the pack's dtype; products accumulate
    in float32.
    """

    sources: tuple[int, ...]
    weight: torch.Tensor
    bias: torch.Tensor
    input_mean: torch.Tensor
    basis: torch.Tensor

    @cached_property
    def prediction_mean(self) -> torch.Tensor:
        """mu-hat = x-bar W + b (equation 3): float32 [d_t]."""
        return self.input_mean @ self.weight.float() + self.bias

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """y-hat = xW + b for features [T, k * d_s]: float32 [T, d_t]."""
        return (features.to(self.weight.dtype) @ self.weight).float() + self.bias

    def disagreement(self, entries: torch.Tensor) -> torch.Tensor:
        """This map's share of s_i (equation 2) for its own predictions [T, d_t]: float32 [T]."""
        return energy_outside(entries - self.prediction_mean, self.basis)


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
    """A source block laid out for the maps, built once per prompt and shared by all target layers.

    Appendix B.1: rebuilding de-rotated source blocks for every target layer cost more than the map.
    """

    def __init__(self, block: KVBlock, dtype: torch.dtype) -> None:
        # [T, layers, d_s]: any ascending choice of layers is then one gather, all of them a view.
        self._sides = {
            "key": block.keys.flatten(2).transpose(0, 1).to(dtype).contiguous(),
            "value": block.values.flatten(2).transpose(0, 1).to(dtype).contiguous(),
        }
        self._layers = block.geometry.layers

    def of(self, side: str, sources: tuple[int, ...]) -> torch.Tensor:
        """x of every token: [T, k * d_s]."""
        table = self._sides[side]
        if len(sources) == self._layers:
            return table.flatten(1)
        return table[:, list(sources)].flatten(1)


@dataclass(frozen=True)
class CrossModelMap:
    """All maps of a pack: `layers[l][side]` for target layer l."""

    layers: tuple[dict[str, SideMap], ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.layers[0]["key"].weight.dtype

    def fill(
        self,
        block: KVBlock,
        start: int,
        geometry: KVGeometry,
        rotation: Rotation,
        write: Callable[[int, torch.Tensor, torch.Tensor], None],
        phases: Phases,
    ) -> torch.Tensor:
        """Maps a source block to the target's positions start, start + 1, ..., and scores each token.

        geometry and rotation are the target's. Calls write(layer, keys, values) once per target layer
        with float32 [T, kv_heads, head_dim], keys rotated to their positions; never holds more than one
        layer's output. Returns the rank disagreement s_i (equation 2), summed over layers and sides:
        float32 [T]. Adds to the phases `map`, `score` and `write`.
        """
        with phases("map"):
            features = SourceFeatures(block, self.dtype)
            turn = rotation.at(torch.arange(start, start + len(block), device=block.keys.device))
        scores = torch.zeros(len(block), device=block.keys.device)
        shape = (len(block), geometry.kv_heads, geometry.head_dim)
        for layer, sides in enumerate(self.layers):
            entries = {}
            for side, one in sides.items():
                with phases("map"):
                    entries[side] = one.predict(features.of(side, one.sources))
                with phases("score"):
                    scores += one.disagreement(entries[side])
            with phases("write"):
                write(layer, turn.rotate(entries["key"].view(shape)), entries["value"].view(shape))
        return scores
