"""Ways to compile in a scheduler: what a method changes of the plain forward over a document's tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch

from sglang_ext.block import KVBlock
from sglang_ext.documents.document import SOFT, Document
from sglang_ext.documents.record import MethodName
from sglang_ext.errors import DocumentError
from sglang_ext.identity import ModelIdentity
from sglang_ext.worker.executor import soft_token

_PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "o_proj": ("o_proj",)}
"""SGLang's attention projections, and whose rows each of them holds one below the other."""


@dataclass(frozen=True)
class Way:
    """How one method compiles.

    writing: makes the context in which the model is the Writer, None for a method that keeps the model's weights; soft:
    float [header + trailer, hidden], the embeddings that stand around a document, None without.
    """

    writing: Callable[[], AbstractContextManager[None]] | None = None
    soft: torch.Tensor | None = None
    header: int = 0

    def enclosed(self, ids: Sequence[int]) -> torch.Tensor:
        """The tokens to run, int64: the document's, and soft ones around them (executor.py, `soft_token`)."""
        count = 0 if self.soft is None else len(self.soft)
        soft = [soft_token(row) for row in range(count)]
        return torch.tensor([*soft[: self.header], *ids, *soft[self.header :]], dtype=torch.int64)


def ways_of(model: Any, folders: Sequence[str], identity: ModelIdentity) -> dict[MethodName, Way]:
    """The ways of a worker, by method: plain, and one for each adapter.

    model: SGLang's; each Writer keeps its attention weights merged beside it. Raises DocumentError for an adapter of
    another model, and for a model whose weights cannot take it.
    """
    ways: dict[MethodName, Way] = {"plain": Way()}
    for folder in folders:
        from sglang_ext.documents.adapter import read_weights

        manifest, lora, soft = read_weights(folder, identity)
        settings = manifest.settings
        writing = None if lora is None else MergedWriter(model, lora, settings.alpha / settings.rank).writing
        if soft is None:
            ways[settings.method] = Way(writing)
        else:
            around = torch.cat([soft["header"], soft["trailer"]])
            ways[settings.method] = Way(writing, around, len(soft["header"]))
    return ways


def document_of(block: KVBlock) -> Document:
    """The document that a block was made of; its soft entries, where it has some, stand first and last."""
    own = torch.nonzero(block.tokens != SOFT).flatten().tolist() or [0, -1]
    return Document(block, own[0], len(block) - 1 - own[-1])


class MergedWriter:
    """A model's attention weights with LoRA added to them, in their places only inside `writing()`.

    Outside of it the model's own weights are there, not a copy: the Reader is the base model bit for bit.
    """

    def __init__(self, model: Any, lora: Mapping[str, torch.Tensor], scale: float) -> None:
        """lora: by peft's names; scale: alpha / rank. Raises DocumentError where a projection has no plain weight."""
        self._merged: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        used = 0
        for name, module in model.named_modules():
            parts = _PARTS.get(name.rpartition(".")[2])
            if parts is None:
                continue
            layer = name.rpartition(".")[0]
            pairs = [_pair(lora, f"{layer}.{part}") for part in parts]
            delta = scale * torch.cat([up.float() @ down.float() for down, up in pairs])
            self._merged.append(_merge(name, module, delta))
            used += 2 * len(parts)
        if used != len(lora):
            raise DocumentError(f"the adapter has {len(lora)} tensors, the model took {used} of them")

    @contextmanager
    def writing(self) -> Iterator[None]:
        """The model is the Writer inside."""
        own = [parameter.data for parameter, _ in self._merged]
        for parameter, merged in self._merged:
            parameter.data = merged
        try:
            yield
        finally:
            for (parameter, _), data in zip(self._merged, own, strict=True):
                parameter.data = data


def _pair(lora: Mapping[str, torch.Tensor], name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A [rank, inputs] and B [outputs, rank] of one projection."""
    try:
        return lora[f"{name}.lora_A.weight"], lora[f"{name}.lora_B.weight"]
    except KeyError as error:
        raise DocumentError(f"the adapter has no {error.args[0]}: it was made for another kind of model") from error


def _merge(name: str, module: Any, delta: torch.Tensor) -> tuple[torch.nn.Parameter, torch.Tensor]:
    weight = getattr(module, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.shape != delta.shape:
        found = None if weight is None else (weight.dtype, tuple(weight.shape))
        raise DocumentError(f"{name} holds {found}: an adapter needs plain weights {tuple(delta.shape)}")
    return weight, (weight.data.float() + delta.to(weight.device)).to(weight.dtype)
