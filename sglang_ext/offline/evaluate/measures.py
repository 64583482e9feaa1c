"""What is measured of a cache: the greedy answer, or how faithfully the target's own answer is continued."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from sglang_ext.offline import acceptance
from sglang_ext.offline.evaluate.datasets.items import Item
from sglang_ext.offline.evaluate.store import Outcome, item_digest
from sglang_ext.offline.executor import Row, TransformersExecutor

MeasureName = Literal["answers", "fidelity"]


class Batch:
    """Prompts that run together: items and their token ids, of the target's own prefill."""

    def __init__(self, items: Sequence[Item], prompts: Sequence[list[int]], limits: Sequence[int]) -> None:
        self.items, self.prompts, self.limits = items, prompts, limits
        self.digests = [item_digest(ids, limit) for ids, limit in zip(prompts, limits)]


class Measure(Protocol):
    """Turns rows whose prompts are computed into outcomes. `name` is part of what an outcome depends on."""

    name: MeasureName

    def limit(self, item: Item) -> int:
        """Tokens that follow the prompt, for which a row needs room."""
        ...

    def reference(self, target: TransformersExecutor, batch: Batch, rows: Sequence[Row], logits: torch.Tensor) -> Any:
        """What other arms are compared with, of the target's own rows. Whatever it adds to them, their prompts stay."""
        ...

    def outcomes(
        self, model: TransformersExecutor, batch: Batch, rows: Sequence[Row], logits: torch.Tensor, reference: Any
    ) -> list[Outcome]:
        """One per item, for rows of any model of the family with their last logits [n, V]. Rows grow in place."""
        ...


class Answers:
    """Greedy answers, as text."""

    name: MeasureName = "answers"

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def limit(self, item: Item) -> int:
        return item.max_new_tokens

    def reference(self, target: TransformersExecutor, batch: Batch, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Answers are compared with gold, not with the target's."""

    def outcomes(
        self, model: TransformersExecutor, batch: Batch, rows: Sequence[Row], logits: torch.Tensor, reference: None
    ) -> list[Outcome]:
        answers = model.greedy(rows, logits, max(batch.limits), stop_tokens(model, self._tokenizer))
        return [
            Outcome(item=digest, text=self._tokenizer.decode(answer[:limit], skip_special_tokens=True))
            for digest, answer, limit in zip(batch.digests, answers, batch.limits)
        ]


class Fidelity:
    """Teacher-forced continuation of the target's own greedy answer: agreement of the most likely token, and KL.

    For models that cannot solve a task. The rule is the acceptance record's, of which it is one arm.
    """

    name: MeasureName = "fidelity"

    def limit(self, item: Item) -> int:
        return acceptance.CONTINUATION

    def reference(
        self, target: TransformersExecutor, batch: Batch, rows: Sequence[Row], logits: torch.Tensor
    ) -> list[tuple[list[int], Any]]:
        """Per prompt the target's answer and its own forced continuation."""
        answers = target.greedy(rows, logits, acceptance.CONTINUATION, stop=[])
        return [
            (answer, acceptance.force(target, row, ids, answer))
            for row, ids, answer in zip(rows, batch.prompts, answers)
        ]

    def outcomes(
        self,
        model: TransformersExecutor,
        batch: Batch,
        rows: Sequence[Row],
        logits: torch.Tensor,
        reference: list[tuple[list[int], Any]],
    ) -> list[Outcome]:
        found = []
        for digest, row, ids, (answer, native) in zip(batch.digests, rows, batch.prompts, reference):
            forced = acceptance.force(model, row, ids, answer)
            agree, kl, tokens = acceptance.compare(native, forced, answer)
            found.append(Outcome(item=digest, agree=agree, kl=kl, tokens=tokens))
        return found


def stop_tokens(model: TransformersExecutor, tokenizer: Any) -> list[int]:
    """The ids that end an answer: the tokenizer's, and those of the model's generation settings."""
    own = model.model.generation_config.eos_token_id
    return sorted({*([own] if isinstance(own, int) else own or []), tokenizer.eos_token_id} - {None})
