"""The KV of a span of tokens, free of position: what workers exchange, store, map and link."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from sglang_ext.errors import BlockError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.rope import Rotation

FORMAT = 1


@dataclass(frozen=True)
class KVBlock:
    """Keys without rotation and values of T tokens, and whose they are.

    tokens: int64 [T]; keys: float32 [layers, T, kv_heads, head_dim]; values: the pool's dtype, same
    shape. Keys stay float32 because a bf16 key without its rotation has lost more than bf16 rounding.
    attention: float32 [T], the share of the model's attention that each token received (attention.py,
    `attention_received`), where the block was made with it.
    """

    tokens: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    geometry: KVGeometry
    identity: ModelIdentity
    attention: torch.Tensor | None = None

    def __post_init__(self) -> None:
        g = self.geometry
        expected = (g.layers, len(self.tokens), g.kv_heads, g.head_dim)
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            if tuple(tensor.shape) != expected:
                raise BlockError(f"{name} have shape {tuple(tensor.shape)}, expected {expected}")
        if self.attention is not None and self.attention.shape != self.tokens.shape:
            raise BlockError(f"attention has shape {tuple(self.attention.shape)}, expected {tuple(self.tokens.shape)}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.tokens, self.keys, self.values))

    @classmethod
    def from_rotated(
        cls,
        tokens: Sequence[int] | torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rotation: Rotation,
        geometry: KVGeometry,
        identity: ModelIdentity,
        start: int = 0,
        attention: torch.Tensor | None = None,
    ) -> KVBlock:
        """Undoes the rotation of keys that lie at positions start, start + 1, ..."""
        tokens = torch.as_tensor(tokens, dtype=torch.int64)
        positions = torch.arange(start, start + len(tokens), device=keys.device)
        return cls(tokens, rotation.unrotate(keys, positions), values, geometry, identity, attention)

    def keys_at(self, layer: int, start: int, rotation: Rotation) -> torch.Tensor:
        """One layer's keys moved to positions start, start + 1, ...: float32 [T, kv_heads, head_dim]."""
        positions = torch.arange(start, start + len(self), device=self.keys.device)
        return rotation.rotate(self.keys[layer], positions)

    def span(self, start: int, stop: int) -> KVBlock:
        """A view of the tokens [start, stop)."""
        return KVBlock(
            self.tokens[start:stop], self.keys[:, start:stop], self.values[:, start:stop],
            self.geometry, self.identity, None if self.attention is None else self.attention[start:stop],
        )  # fmt: skip

    def to(self, device: torch.device) -> KVBlock:
        """The block with all but its token ids on a device."""
        attention = None if self.attention is None else self.attention.to(device)
        return KVBlock(
            self.tokens, self.keys.to(device), self.values.to(device), self.geometry, self.identity, attention
        )

    def check_tokens(self, ids: Sequence[int]) -> None:
        """Raises BlockError unless this block's tokens are a prefix of `ids`."""
        own = self.tokens.tolist()
        if own != list(ids[: len(own)]):
            raise BlockError(
                f"the block's {len(own)} tokens are not a prefix of the prompt's {len(ids)}: "
                "source and target render the messages differently"
            )

    def check_finite(self) -> None:
        """Raises BlockError where a key or value is NaN or infinite."""
        for name, tensor in (("keys", self.keys), ("values", self.values)):
            # A sum shows it in one pass; in float64, finite float32 numbers cannot overflow it.
            if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))):
                raise BlockError(f"the block's {name} hold NaN or infinite numbers")

    def save(self, path: str | Path) -> None:
        """Writes the block, with a checksum over its tensors, as one safetensors file."""
        tensors = {
            "tokens": self.tokens.cpu(),
            "keys": self.keys.cpu().contiguous(),
            "values": self.values.cpu().contiguous(),
        }
        if self.attention is not None:
            tensors["attention"] = self.attention.cpu()
        header = {
            "format": FORMAT,
            "geometry": self.geometry.to_json(),
            "identity": self.identity.to_json(),
        }
        text = json.dumps(header, sort_keys=True)
        save_file(tensors, str(path), metadata={"kvlift": text, "checksum": _checksum(text, tensors)})

    @classmethod
    def load(cls, path: str | Path) -> KVBlock:
        """Maps a saved block into memory. Raises BlockError for one that is truncated or changed."""
        try:
            with safe_open(str(path), framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
            text = about.get("kvlift", "{}")
            header = json.loads(text)
        except (SafetensorError, OSError, UnicodeError, json.JSONDecodeError) as error:
            raise BlockError(f"the block {Path(path).name} cannot be read: {error}") from error
        if header.get("format") != FORMAT:
            raise BlockError(f"the block has format {header.get('format')!r}, expected {FORMAT}")
        if about.get("checksum") != _checksum(text, tensors):
            raise BlockError(f"the block {Path(path).name} was changed on its way: checksums differ")
        return cls(
            tensors["tokens"], tensors["keys"], tensors["values"],
            KVGeometry.from_json(header["geometry"]), ModelIdentity(**header["identity"]), tensors.get("attention"),
        )  # fmt: skip


def _checksum(header: str, tensors: dict[str, torch.Tensor]) -> str:
    """Over the header's text and each tensor's name, dtype, shape and bytes."""
    digest = xxhash.xxh3_128(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.view(torch.uint8).numpy())
    return digest.hexdigest()
