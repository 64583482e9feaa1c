"""Fitting the maps in closed form from second moments: one pass over the calibration tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import CalibrationError
from sglang_ext.transfer.maps import SIDES, CrossModelMap, SideMap
from sglang_ext.transfer.pack import LayerRecord


class Moments:
    """X'X, X'Y and the sums of one side over all tokens seen, in float64.

    X is [N, source layers * d_s], Y is [N, target layers * d_t]; memory does not grow with N.
    """

    def __init__(self, inputs: int, outputs: int, device: torch.device | str = "cpu") -> None:
        make = {"dtype": torch.float64, "device": device}
        self.count = 0
        self.xx = torch.zeros(inputs, inputs, **make)
        self.xy = torch.zeros(inputs, outputs, **make)
        self.x = torch.zeros(inputs, **make)
        self.y = torch.zeros(outputs, **make)
        self.yy = torch.zeros(outputs, **make)

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds tokens: x [n, inputs], y [n, outputs]. Raises CalibrationError for NaN or infinity."""
        x, y = x.to(self.xx), y.to(self.xx)
        if not (bool(torch.isfinite(x).all()) and bool(torch.isfinite(y).all())):
            raise CalibrationError("a model's cache holds NaN or infinite numbers on a calibration prompt")
        self.count += len(x)
        self.xx += x.T @ x
        self.xy += x.T @ y
        self.x += x.sum(0)
        self.y += y.sum(0)
        self.yy += y.square().sum(0)

    def centred(self) -> Centred:
        n = self.count
        return Centred(
            xx=self.xx - torch.outer(self.x, self.x) / n,
            xy=self.xy - torch.outer(self.x, self.y) / n,
            yy=self.yy - self.y.square() / n,
            x_mean=self.x / n,
            y_mean=self.y / n,
            count=n,
        )


class Centred(NamedTuple):
    """Second moments about the means."""

    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor  # the diagonal of Y'Y
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    count: int


class Fit(NamedTuple):
    """The maps and, per target layer and side, their sources and fit."""

    maps: CrossModelMap
    records: tuple[dict[str, LayerRecord], ...]


def entries(block: KVBlock, side: str) -> torch.Tensor:
    """A block's tokens as rows: [T, layers * kv_heads * head_dim], keys without rotation."""
    tensor = block.keys if side == "key" else block.values
    return tensor.transpose(0, 1).flatten(1)


class MapFitter:
    """Accumulates pairs of blocks of the same tokens and solves for all maps (section 3.1)."""

    def __init__(
        self, source_layers: int, source_width: int, target_layers: int, target_width: int,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self._source = (source_layers, source_width)
        self._target = (target_layers, target_width)
        shape = (source_layers * source_width, target_layers * target_width)
        self._moments = {side: Moments(*shape, device) for side in SIDES}

    @property
    def count(self) -> int:
        return self._moments["key"].count

    def add(self, source: KVBlock, target: KVBlock, rows: torch.Tensor) -> None:
        """Adds the tokens at `rows` (int64 positions) of two blocks of one prompt."""
        for side in SIDES:
            self._moments[side].add(entries(source, side)[rows], entries(target, side)[rows])

    def solve(self, k: int, rank: int, ridge: float, dtype: torch.dtype) -> Fit:
        """The maps of every target layer and side from the k source layers of largest R^2.

        Raises CalibrationError where k, rank or the number of tokens cannot give them.
        """
        source_layers, source_width = self._source
        target_layers, target_width = self._target
        if not 1 <= k <= source_layers:
            raise CalibrationError(f"k = {k} source layers asked for, but the source has {source_layers}")
        if not 1 <= rank <= target_width:
            raise CalibrationError(f"rank {rank} asked for, but a target entry has d_t = {target_width} values")
        if self.count < k * source_width:
            raise CalibrationError(
                f"{self.count} calibration tokens cannot determine a map of {k * source_width} features; "
                "give more prompts, a smaller stride or a smaller k"
            )
        layers: list[dict[str, SideMap]] = [{} for _ in range(target_layers)]
        records: list[dict[str, LayerRecord]] = [{} for _ in range(target_layers)]
        for side in SIDES:
            moments = self._moments[side].centred()
            scores = _single_layer_r2(moments, source_layers, source_width, target_layers, ridge)
            for layer in range(target_layers):
                sources = tuple(sorted(scores[:, layer].topk(k).indices.tolist()))
                one, r2 = _solve_one(moments, sources, source_width, layer, target_width, rank, ridge, dtype)
                layers[layer][side] = one
                records[layer][side] = LayerRecord(sources=sources, r2=r2)
        return Fit(CrossModelMap(tuple(layers)), tuple(records))


def held_out(fit: Fit, moments: HeldOut) -> Fit:
    """The fit with each record's held-out R^2 filled in."""
    records = tuple(
        {side: one.model_copy(update={"r2_held_out": moments.r2(layer, side)}) for side, one in sides.items()}
        for layer, sides in enumerate(fit.records)
    )
    return Fit(fit.maps, records)


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


def _single_layer_r2(
    moments: Centred, source_layers: int, width: int, target_layers: int, ridge: float
) -> torch.Tensor:
    """R^2 of each target layer from each source layer alone: float64 [source layers, target layers]."""
    total = moments.yy.view(target_layers, -1).sum(1)
    scores = []
    for layer in range(source_layers):
        span = slice(layer * width, (layer + 1) * width)
        xx, xy = moments.xx[span, span], moments.xy[span]
        weight = _ridge(xx, xy, ridge)
        explained = 2 * (weight * xy).sum(0) - (weight * (xx @ weight)).sum(0)
        scores.append(explained.view(target_layers, -1).sum(1) / total.clamp_min(1e-12))
    return torch.stack(scores)


def _solve_one(
    moments: Centred, sources: tuple[int, ...], source_width: int,
    layer: int, target_width: int, rank: int, ridge: float, dtype: torch.dtype,
) -> tuple[SideMap, float]:  # fmt: skip
    rows = torch.cat([torch.arange(s * source_width, (s + 1) * source_width) for s in sources]).to(moments.xx.device)
    columns = slice(layer * target_width, (layer + 1) * target_width)
    xx, xy = moments.xx[rows][:, rows], moments.xy[rows, columns]
    # The bias and the basis belong to the weight as it is stored, rounding included.
    weight = _ridge(xx, xy, ridge).to(dtype)
    exact = weight.double()
    covariance = exact.T @ xx @ exact / moments.count
    basis = torch.linalg.eigh(covariance).eigenvectors.flip(1)[:, :rank]
    bias = moments.y_mean[columns] - moments.x_mean[rows] @ exact
    explained = float(2 * (exact * xy).sum() - (exact * (xx @ exact)).sum())
    r2 = explained / max(float(moments.yy[columns].sum()), 1e-12)
    one = SideMap(sources, weight, bias.float(), moments.x_mean[rows].float(), basis.float().contiguous())
    return one, r2


def _ridge(xx: torch.Tensor, xy: torch.Tensor, ridge: float) -> torch.Tensor:
    """(X'X + lambda I)^-1 X'Y (equation 1)."""
    damped = xx + ridge * torch.eye(len(xx), dtype=xx.dtype, device=xx.device)
    try:
        return torch.cholesky_solve(xy, torch.linalg.cholesky(damped))
    except torch.linalg.LinAlgError as error:
        raise CalibrationError(
            f"X'X + {ridge} I is singular: the source features are linearly dependent; give a larger ridge"
        ) from error
