"""Second moments of pairs of cache entries: all that a linear fit needs to know of its calibration tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

_SUMS = ("xx", "xy", "x", "y", "yy")


class Centred(NamedTuple):
    """Second moments about the means."""

    xx: torch.Tensor
    xy: torch.Tensor
    yy: torch.Tensor  # the diagonal of Y'Y
    x_mean: torch.Tensor
    y_mean: torch.Tensor
    count: int


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
        """Adds tokens: x [n, inputs], y [n, outputs]."""
        x, y = x.to(self.xx), y.to(self.xx)
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

    def state(self) -> dict[str, torch.Tensor]:
        """The sums themselves, not copies of them, and the int64 count."""
        return {"count": torch.tensor(self.count), **{name: getattr(self, name) for name in _SUMS}}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on from a `state` of moments of the same shape, to the bit."""
        self.count = int(state["count"])
        for name in _SUMS:
            getattr(self, name).copy_(state[name])
