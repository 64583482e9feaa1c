"""Small models, adapters that differ from the base, and records, for the tests of training."""

from __future__ import annotations

import torch

from sglang_ext.documents.corpus import Corpus, Record
from sglang_ext.documents.settings import TrainSettings
from sglang_ext.documents.trainable import Trainable
from sglang_ext.offline.executor import TransformersExecutor
from tests.kv.builders import random
from tests.kv.models import VOCABULARY, executor, prompts

KINDS = ("qwen3", "llama")
METHODS = ("packet", "sempic", "joint")
LENGTHS = (5, 11, 3)  # of a record's documents


def trainable(kind: str = "qwen3", method: str = "sempic", strength: float = 0.3, **shape: int) -> Trainable:
    """An adapter that has left its start, so that it changes what the Writer writes. shape: of the model."""
    made = Trainable(executor(kind, **shape), TrainSettings(method=method, rank=4, soft=3))
    with torch.no_grad():
        for number, (name, parameter) in enumerate(made.parameters.items()):
            if "lora_B" in name:
                parameter.copy_(strength * random(number, *parameter.shape))
    return made


def record(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Record:
    """P, D1, S1, D2, S2, ..., Q."""
    inline = prompts((4, *(2 for _ in lengths[1:]), 6), seed=seed)
    documents = prompts(lengths, seed=seed + 1000)
    spans = [(tuple(inline[0]), False)]
    for document, after in zip(documents, inline[1:], strict=True):
        spans += [(tuple(document), True), (tuple(after), False)]
    return Record(tuple(spans))


def corpus(count: int) -> Corpus:
    return Corpus(tuple(record(seed, LENGTHS[: 1 + seed % 3]) for seed in range(count)))


def gradients(made: Trainable) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in made.parameters.items()}


def embedded(one: TransformersExecutor, lengths=LENGTHS, seed: int = 0) -> list[torch.Tensor]:
    """Documents as embeddings [n, hidden]."""
    table = one.model.model.embed_tokens
    return [table(torch.tensor(ids)).detach() for ids in prompts(lengths, seed=seed, vocabulary=VOCABULARY)]
