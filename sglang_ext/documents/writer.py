"""The Writer: a model with LoRA on its attention projections, switched on only while documents are compiled.

Outside of `writing()` the model is the unchanged Reader, to the bit, while the adapter's parameters stay trainable: a
gradient reaches them through the keys and values that they helped to make (equation 9).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from sglang_ext.errors import DocumentError

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
FAMILIES = ("llama", "qwen3")


def lora_config(rank: int, alpha: float) -> LoraConfig:
    """LoRA on q/k/v/o without dropout, as in table 4."""
    return LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=list(PROJECTIONS), bias="none")


class Writer:
    """One adapter of a model. Making it puts the adapter into the model's projections, switched off.

    A model takes several Writers of different names; at most one is on at a time.
    """

    def __init__(self, model: PreTrainedModel, config: LoraConfig, name: str = "writer", seed: int = 0) -> None:
        """seed: of the random half of the adapter; the other half is zero, so that a new Writer is the base model.

        Raises DocumentError for a model that is neither Llama nor Qwen3.
        """
        if model.config.model_type not in FAMILIES:
            raise DocumentError(
                f"a Writer needs a model of type {' or '.join(FAMILIES)}, this one is {model.config.model_type!r}"
            )
        self.model, self.config, self.name = model, config, name
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
            torch.manual_seed(seed)
            inject_adapter_in_model(config, model, adapter_name=name)
        self._adapted = {layer: _adapted(layer) for layer in model.model.layers}
        self.parameters = _parameters(model, name)
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()  # what is learned must not be rounded to the base's bfloat16
        self._switch(model.model.layers, on=False)

    @contextmanager
    def writing(self, layer: nn.Module | None = None) -> Iterator[None]:
        """The model, or one of its decoder layers, is the Writer inside. The parameters stay trainable throughout."""
        layers = self._adapted if layer is None else [layer]
        self._switch(layers, on=True)
        try:
            yield
        finally:
            self._switch(layers, on=False)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of the adapter's tensors under peft's names, in which the adapter's own does not stand."""
        return {self._outside(name): one.detach().clone() for name, one in self.parameters.items()}

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Raises DocumentError for tensors that are not those of such an adapter."""
        own = {self._outside(name): tuple(one.shape) for name, one in self.parameters.items()}
        given = {name: tuple(tensor.shape) for name, tensor in state.items()}
        if own != given:
            odd = sorted(name for name in own.keys() | given.keys() if own.get(name) != given.get(name))
            raise DocumentError(
                f"the adapter's tensors are not those of this model: {odd[0]} is {given.get(odd[0])}, "
                f"expected {own.get(odd[0])}"
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state[self._outside(name)])

    def _outside(self, name: str) -> str:
        return name.replace(f".{self.name}.", ".")

    def _switch(self, layers, *, on: bool) -> None:
        for layer in layers:
            for projection in self._adapted[layer]:
                projection.enable_adapters(on)
                # Switching off also freezes, and a frozen parameter drops the gradient that reaches it later.
                projection.set_adapter(self.name)


def _adapted(layer: nn.Module) -> list[LoraLayer]:
    return [module for module in layer.modules() if isinstance(module, LoraLayer)]


def _parameters(model: nn.Module, name: str) -> dict[str, nn.Parameter]:
    """The trainable parameters of one adapter, by their names in the model."""
    return {key: one for key, one in model.named_parameters() if ".lora_" in key and f".{name}." in key}
