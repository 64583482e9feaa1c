"""Rotary position encoding, and its inverse: what makes a key position-free.

The angle of pair i at position p is p * f_i. A rope type only changes the frequencies f_i, and yarn
also scales the length of the rotated key. Rotation by p followed by rotation by q is rotation by
p + q, so that moving a key from a to b (SemPIC, equation 3) is `rotate(unrotate(k, a), b)`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Mapping

import torch

from sglang_ext.errors import GeometryError

SUPPORTED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """One model's rope: the type and its parameters, in the names of the Hugging Face configuration."""

    kind: str
    theta: float
    rotary_dim: int
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True  # yarn: whole pair indices bound the blend

    @classmethod
    def from_config(cls, config: Mapping[str, Any], head_dim: int) -> RopeSpec:
        """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

        Raises GeometryError for a rope type that is not in SUPPORTED_ROPE.
        """
        given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in SUPPORTED_ROPE:
            raise GeometryError(
                f"rope type {kind!r} is not supported; expected one of {', '.join(SUPPORTED_ROPE)}"
            )
        partial = given.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        factor = float(given.get("factor", 1.0))
        return cls(
            kind=kind,
            theta=float(given.get("rope_theta", config.get("rope_theta", 10000.0))),
            rotary_dim=int(head_dim * partial),
            factor=factor,
            original_max_position=int(
                given.get("original_max_position_embeddings")
                or config.get("original_max_position_embeddings")
                or config.get("max_position_embeddings", 0)
            ),
            low_freq_factor=float(given.get("low_freq_factor", 1.0)),
            high_freq_factor=float(given.get("high_freq_factor", 4.0)),
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(kind, factor, given),
            truncate=bool(given.get("truncate", True)),
        )

    def frequencies(self) -> torch.Tensor:
        """Radians per position of each pair: float32 [rotary_dim / 2]."""
        pairs = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
        base = 1.0 / (self.theta**pairs)
        if self.kind == "linear":
            return base / self.factor
        if self.kind == "llama3":
            return self._llama3(base)
        if self.kind == "yarn":
            return self._yarn(base)
        return base

    def _llama3(self, base: torch.Tensor) -> torch.Tensor:
        # Long waves are stretched by the factor, short ones kept, and those between are blended.
        turns = self.original_max_position * base / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)
        return blend * base + (1 - blend) * base / self.factor

    def _yarn(self, base: torch.Tensor) -> torch.Tensor:
        half = self.rotary_dim // 2
        low, high = self._pair_with_turns(self.beta_fast), self._pair_with_turns(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (torch.arange(half, dtype=torch.float32) - low) / max(high - low, 0.001)
        keep = 1 - ramp.clamp(0.0, 1.0)
        return keep * base + (1 - keep) * base / self.factor

    def _pair_with_turns(self, turns: float) -> float:
        """The (fractional) index of the pair that turns so often within the original length."""
        length = self.original_max_position / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(length) / (2 * math.log(self.theta))


def _attention_factor(kind: str, factor: float, given: Mapping[str, Any]) -> float:
    if kind != "yarn":
        return 1.0
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("mscale") and given.get("mscale_all_dim"):
        return mscale(given["mscale"]) / mscale(given["mscale_all_dim"])
    return mscale(1.0)


class Rotation:
    """Turns keys to positions and back. Holds the frequencies of one spec on one device."""

    def __init__(self, spec: RopeSpec, device: torch.device | str = "cpu") -> None:
        self.spec = spec
        self._frequencies = spec.frequencies().to(device)

    def at(self, positions: torch.Tensor) -> Turn:
        """The rotation to `positions` [T], ready to be applied to the keys of any layer."""
        angles = positions.to(torch.float32)[:, None] * self._frequencies  # [T, rotary_dim / 2]
        return Turn(angles.cos()[:, None], angles.sin()[:, None], self.spec.attention_factor)

    def rotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Position-free keys [..., T, heads, head_dim] to `positions` [T]; float32 out."""
        return self.at(positions).rotate(keys)

    def unrotate(self, keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The inverse of `rotate`; float32 out, because a bf16 result would lose what the map reads."""
        return self.at(positions).unrotate(keys)


class Turn:
    """One rotation per position. cos, sin: float32 [T, 1, rotary_dim / 2]."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor, scale: float) -> None:
        self._cos, self._sin, self._scale = cos, sin, scale

    def table(self) -> torch.Tensor:
        """Scaled cosines, then sines, of each position: float32 [T, rotary_dim], as servers keep them."""
        return torch.cat([self._cos, self._sin], dim=-1)[:, 0] * self._scale

    def rotate(self, keys: torch.Tensor) -> torch.Tensor:
        return _turn(keys, self._cos * self._scale, self._sin * self._scale)

    def unrotate(self, keys: torch.Tensor) -> torch.Tensor:
        return _turn(keys, self._cos / self._scale, -self._sin / self._scale)


def _turn(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    keys = keys.to(torch.float32)
    first, second = keys[..., :half], keys[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    # A partial rotary factor leaves the tail of each head without position.
    return torch.cat([*turned, keys[..., 2 * half :]], dim=-1)
