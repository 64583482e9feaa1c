"""What a method trains: a Writer's LoRA, soft tokens around documents, or both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_ext.documents.checkpointing import Run, reader_only
from sglang_ext.documents.settings import TrainSettings
from sglang_ext.documents.student import Student
from sglang_ext.documents.writer import Writer, lora_config
from sglang_ext.offline.executor import TransformersExecutor


class Trainable:
    """The parameters of one method on one model; everything else of the model is frozen.

    parameters: by name, float32. writer: None for KV Packet. header, trailer: [soft, hidden], None for SemPIC.
    """

    def __init__(self, executor: TransformersExecutor, settings: TrainSettings) -> None:
        self.executor, self.settings = executor, settings
        executor.model.requires_grad_(False)
        self.parameters: dict[str, nn.Parameter] = {}
        self.writer: Writer | None = None
        self.header: nn.Parameter | None = None
        self.trailer: nn.Parameter | None = None
        if settings.has_adapter:
            config = lora_config(settings.rank, settings.alpha)
            self.writer = Writer(executor.model, config, seed=settings.seed)
            self.parameters |= self.writer.parameters
        if settings.has_soft_tokens:
            self.header, self.trailer = self._soft_tokens()
            self.parameters |= {"header": self.header, "trailer": self.trailer}

    def student(self, run: Run) -> Student:
        switch = self.writer.writing if self.writer is not None else reader_only
        return Student(self.executor, switch, self.header, self.trailer, run)

    def state(self) -> dict[str, Tensor]:
        """Copies of the parameters."""
        return {name: parameter.detach().clone() for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def restore(self, state: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(state[name])

    def _soft_tokens(self) -> tuple[nn.Parameter, nn.Parameter]:
        """Header and trailer start as embeddings of tokens drawn from the vocabulary, which the model knows."""
        table = self.executor.model.model.embed_tokens.weight.detach()
        count = 2 * self.settings.soft
        drawn = torch.randint(len(table), (count,), generator=torch.Generator().manual_seed(self.settings.seed))
        rows = table[drawn.to(table.device)].float()
        return nn.Parameter(rows[: self.settings.soft].clone()), nn.Parameter(rows[self.settings.soft :].clone())
