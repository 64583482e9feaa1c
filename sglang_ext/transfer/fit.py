"""Fitting the maps in closed form from second moments: one pass over the calibration tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.geometry import KVGeometry
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap, Structure
from sglang_ext.transfer.moments import Centred, Moments
from sglang_ext.transfer.pack import LayerRecord


class Fit(NamedTuple):
    """The maps and, per target layer and side, their sources and fit."""

    maps: CrossModelMap
    records: tuple[dict[str, LayerRecord], ...]


def entries(block: KVBlock, side: str) -> torch.Tensor:
    """A block's tokens as rows: [T, layers * kv_heads * head_dim], keys without rotation."""
    tensor = block.keys if side == "key" else block.values
    return tensor.transpose(0, 1).flatten(1)


def check_shapes(source: KVGeometry, target: KVGeometry, k: int, rank: int, structure: Structure) -> None:
    """Raises CalibrationError where no corpus could give these two models such maps."""
    if not 1 <= k <= source.layers:
        raise CalibrationError(f"k = {k} source layers asked for, but the source has {source.layers}")
    if not 1 <= rank <= target.width:
        raise CalibrationError(f"rank {rank} asked for, but a target entry has d_t = {target.width} values")
    if structure == "head" and source.kv_heads != target.kv_heads:
        raise CalibrationError(
            f"structure `head` maps each target head from the source head of the same index, but the source has "
            f"{source.kv_heads} KV heads and the target {target.kv_heads}; use structure `full`"
        )


class MapFitter:
    """Accumulates pairs of blocks of the same tokens and solves for all maps (section 3.1).

    One pass serves every structure, k, rank and ridge: they are choices of the solve.
    """

    def __init__(self, source: KVGeometry, target: KVGeometry, device: torch.device | str = "cpu") -> None:
        self._source, self._target = source, target
        shape = (source.layers * source.width, target.layers * target.width)
        self._moments = {side: Moments(*shape, device) for side in SIDES}

    @property
    def count(self) -> int:
        return self._moments["key"].count

    def add(self, source: KVBlock, target: KVBlock, rows: torch.Tensor) -> None:
        """Adds the tokens at `rows` (int64 positions) of two blocks of one prompt."""
        for side in SIDES:
            self._moments[side].add(entries(source, side)[rows], entries(target, side)[rows])

    def state(self) -> dict[str, torch.Tensor]:
        """Everything accumulated so far, by name, for a checkpoint."""
        return {f"{side}.{name}": one for side in SIDES for name, one in self._moments[side].state().items()}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from the `state` of a fitter of the same two geometries."""
        for side in SIDES:
            inside = {name.removeprefix(f"{side}."): one for name, one in state.items() if name.startswith(f"{side}.")}
            self._moments[side].restore(inside)

    def solve(self, k: int, rank: int, ridge: float, dtype: torch.dtype, structure: Structure = "full") -> Fit:
        """The maps of every target layer and side from the k source layers of largest R^2.

        That R^2 is of a map of the same structure from one layer alone. Raises CalibrationError where k, rank,
        structure or the number of tokens cannot give the maps.
        """
        check_shapes(self._source, self._target, k, rank, structure)
        groups = _Groups(structure, self._source, self._target)
        features = k * self._source.width // groups.count
        if self.count < features:
            raise CalibrationError(
                f"{self.count} calibration tokens cannot determine a map of {features} features; "
                "give more prompts, a smaller stride or a smaller k"
            )
        layers: list[dict[str, SideMap]] = [{} for _ in range(self._target.layers)]
        records: list[dict[str, LayerRecord]] = [{} for _ in range(self._target.layers)]
        for side in SIDES:
            moments = self._moments[side].centred()
            scores = _single_layer_r2(moments, groups, ridge)
            for layer in range(self._target.layers):
                sources = tuple(sorted(scores[:, layer].topk(k).indices.tolist()))
                one, r2 = _solve_one(moments, groups, sources, layer, rank, ridge, dtype)
                layers[layer][side] = one
                records[layer][side] = LayerRecord(sources=sources, r2=r2)
        return Fit(CrossModelMap(tuple(layers)), tuple(records))


class HeldOut:
    """Explained variance of given maps on tokens they were not fitted to."""

    def __init__(self, maps: CrossModelMap) -> None:
        self._maps = maps
        self._error: dict[tuple[int, str], float] = {}
        self._sums: dict[tuple[int, str], torch.Tensor] = {}  # of y and of y squared: [2, d_t]
        self._count = 0

    def add(self, source: KVBlock, target: KVBlock) -> None:
        self._count += len(source)
        for side in SIDES:
            x = entries(source, side).view(len(source), source.geometry.layers, -1)
            y = entries(target, side).view(len(target), target.geometry.layers, -1).double()
            for layer, sides in enumerate(self._maps.layers):
                one, true, at = sides[side], y[:, layer], (layer, side)
                predicted = one.predict(x[:, list(one.sources)].flatten(1)).double()
                self._error[at] = self._error.get(at, 0.0) + float((true - predicted).square().sum())
                self._sums[at] = self._sums.get(at, 0.0) + torch.stack([true.sum(0), true.square().sum(0)])

    def r2(self, layer: int, side: str) -> float:
        total, squares = self._sums[layer, side]
        variance = float((squares - total.square() / self._count).sum())
        return 1.0 - self._error[layer, side] / max(variance, 1e-12)


def held_out(fit: Fit, moments: HeldOut) -> Fit:
    """The fit with each record's held-out R^2 filled in."""
    records = tuple(
        {side: one.model_copy(update={"r2_held_out": moments.r2(layer, side)}) for side, one in sides.items()}
        for layer, sides in enumerate(fit.records)
    )
    return Fit(fit.maps, records)


@dataclass(frozen=True)
class _Groups:
    """The groups of columns that a structure fits apart: one for `full`, one per KV head for `head`."""

    structure: Structure
    source: KVGeometry
    target: KVGeometry

    @property
    def count(self) -> int:
        return 1 if self.structure == "full" else self.source.kv_heads

    def features(self, sources: Sequence[int], group: int) -> torch.Tensor:
        """Columns of X that a group reads, layer by layer: int64 [k * d_s / count]."""
        return _columns(self.source, sources, self.count, group)

    def outputs(self, layers: Sequence[int], group: int) -> torch.Tensor:
        """Columns of Y that a group predicts, layer by layer: int64 [layers * d_t / count]."""
        return _columns(self.target, layers, self.count, group)


def _columns(model: KVGeometry, layers: Sequence[int], groups: int, group: int) -> torch.Tensor:
    width = model.width // groups
    return torch.cat([torch.arange(width) + layer * model.width + group * width for layer in layers])


def _single_layer_r2(moments: Centred, groups: _Groups, ridge: float) -> torch.Tensor:
    """R^2 of each target layer from each source layer alone: float64 [source layers, target layers]."""
    layers, device = groups.target.layers, moments.xx.device
    total = moments.yy.view(layers, -1).sum(1).clamp_min(1e-12)
    scores = []
    for source in range(groups.source.layers):
        explained = torch.zeros_like(total)
        for group in range(groups.count):
            rows, columns = groups.features([source], group).to(device), groups.outputs(range(layers), group).to(device)
            xx, xy = moments.xx[rows][:, rows], moments.xy[rows][:, columns]
            weight = _ridge(xx, xy, ridge)
            gained = 2 * (weight * xy).sum(0) - (weight * (xx @ weight)).sum(0)
            explained += gained.view(layers, -1).sum(1)
        scores.append(explained / total)
    return torch.stack(scores)


def _solve_one(
    moments: Centred, groups: _Groups, sources: tuple[int, ...], layer: int, rank: int, ridge: float, dtype: torch.dtype
) -> tuple[SideMap, float]:
    device = moments.xx.device
    rows = [groups.features(sources, group).to(device) for group in range(groups.count)]
    columns = [groups.outputs([layer], group).to(device) for group in range(groups.count)]
    # The bias and the basis belong to the weights as they are stored, rounding included.
    weights = [
        _ridge(moments.xx[ours][:, ours], moments.xy[ours][:, theirs], ridge).to(dtype)
        for ours, theirs in zip(rows, columns)
    ]
    # All heads together are one map with a block-diagonal weight whose rows go head by head.
    exact = torch.block_diag(*(weight.double() for weight in weights))
    every, whole = torch.cat(rows), torch.cat(columns)
    xx, xy = moments.xx[every][:, every], moments.xy[every][:, whole]
    covariance = exact.T @ xx @ exact / moments.count
    basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :rank]
    bias = moments.y_mean[whole] - moments.x_mean[every] @ exact
    explained = float(2 * (exact * xy).sum() - (exact * (xx @ exact)).sum())
    r2 = explained / max(float(moments.yy[whole].sum()), 1e-12)
    weight = weights[0] if groups.structure == "full" else torch.stack(weights)
    by_layer = _columns(groups.source, sources, 1, 0).to(device)
    return SideMap(sources, weight, bias.float(), moments.x_mean[by_layer].float(), basis.float().contiguous()), r2


def _ridge(xx: torch.Tensor, xy: torch.Tensor, ridge: float) -> torch.Tensor:
    """(X'X + lambda I)^-1 X'Y (equation 1)."""
    damped = xx + ridge * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    try:
        return torch.cholesky_solve(xy, torch.linalg.cholesky(damped))
    except torch.linalg.LinAlgError as error:
        raise CalibrationError(
            f"X'X + {ridge} I is singular: the source features are linearly dependent; give a larger ridge"
        ) from error
