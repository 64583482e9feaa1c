"""Behavioural distillation: the student is drawn to the teacher through the documents' KV (equation 8)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sglang_ext.documents.checkpointing import Run
from sglang_ext.documents.corpus import Corpus
from sglang_ext.documents.settings import Progress
from sglang_ext.documents.teacher import TeacherCache
from sglang_ext.documents.trainable import Trainable
from sglang_ext.errors import CalibrationError, DocumentError
from sglang_ext.offline.checkpoint import Checkpoint, Position

_MOMENTS = ("exp_avg", "exp_avg_sq")


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """tau^2 times the forward KL, teacher to student, summed over tokens and vocabulary: nats (equation 8).

    teacher, student: logits [n, vocabulary]; the teacher's get no gradient.
    """
    target = (teacher.detach().float() / temperature).log_softmax(-1)
    found = (student.float() / temperature).log_softmax(-1)
    return temperature**2 * torch.nn.functional.kl_div(found, target, reduction="sum", log_target=True)


class Distillation:
    """One training run, update by update. A function of corpus, teacher, settings and the base model."""

    def __init__(self, trainable: Trainable, corpus: Corpus, teacher: TeacherCache, run: Run) -> None:
        """teacher: holds a target for each record; run: how the Writer's layers run."""
        self.trainable, self.settings = trainable, trainable.settings
        self._corpus, self._teacher = corpus, teacher
        self._student = trainable.student(run)
        per_epoch = -(-len(corpus.records) // self.settings.batch)
        self.steps = self.settings.epochs * per_epoch
        self._per_epoch = per_epoch
        self.done = 0
        self._losses = torch.zeros(self.steps, dtype=torch.float64)  # nats, summed over the update's tokens
        self._tokens = torch.zeros(self.steps, dtype=torch.float64)
        self._optimizer = torch.optim.AdamW(trainable.parameters.values(), lr=self.settings.rate, weight_decay=0.0)

    def step(self) -> float:
        """The next update. Returns its loss, nats per token. Raises DocumentError for one that is not a number."""
        chosen = self._chosen()
        for start in range(0, len(chosen), self.settings.microbatch):
            self._accumulate(chosen[start : start + self.settings.microbatch])
        loss = self._losses[self.done] / self._tokens[self.done]
        if not bool(torch.isfinite(loss)):
            raise DocumentError(
                f"the loss of update {self.done + 1} is {float(loss)}; lower the learning rate {self.settings.rate}"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self.settings.rate * (1 - self.done / self.steps)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return float(loss)

    @property
    def epoch_losses(self) -> list[float]:
        """The mean of each finished epoch, nats per token."""
        ends = range(self._per_epoch, self.done + 1, self._per_epoch)
        spans = [slice(end - self._per_epoch, end) for end in ends]
        return [float(self._losses[span].sum() / self._tokens[span].sum()) for span in spans]

    def state(self) -> dict[str, Tensor]:
        """All that a later process needs in order to go on, to the bit."""
        tensors = {f"parameter.{name}": one for name, one in self.trainable.state().items()}
        for name, parameter in self.trainable.parameters.items():
            moments = self._optimizer.state.get(parameter) or {}
            tensors |= {f"{what}.{name}": moments[what].clone() for what in _MOMENTS if what in moments}
        return {**tensors, "losses": self._losses.clone(), "tokens": self._tokens.clone()}

    def restore(self, state: Mapping[str, Tensor], done: int) -> None:
        """Goes to where `state` was taken, after `done` updates."""
        names = self.trainable.parameters
        self.trainable.restore({name: state[f"parameter.{name}"] for name in names})
        for name, parameter in names.items():
            # A parameter that never had a gradient (the last layer's q and o) has no moments.
            if f"{_MOMENTS[0]}.{name}" in state:
                moments = {what: state[f"{what}.{name}"].to(parameter.device) for what in _MOMENTS}
                self._optimizer.state[parameter] = {"step": torch.tensor(float(done)), **moments}
        self._losses, self._tokens, self.done = state["losses"], state["tokens"], done

    def _chosen(self) -> list[int]:
        """The records of this update: each epoch goes through all of them in an order of its own."""
        epoch, within = divmod(self.done, self._per_epoch)
        order = list(range(len(self._corpus.records)))
        random.Random(f"{self.settings.seed}/{epoch}").shuffle(order)
        return order[within * self.settings.batch : (within + 1) * self.settings.batch]

    def _accumulate(self, chosen: Sequence[int]) -> None:
        targets = [self._teacher[index] for index in chosen]
        records = [self._corpus.records[index] for index in chosen]
        found = self._student.logits(records, [target.answer for target in targets])
        device = found[0].device
        loss = torch.stack(
            [
                distillation_loss(target.logits.to(device), logits, self.settings.temperature)
                for target, logits in zip(targets, found, strict=True)
            ]
        ).sum()
        loss.backward()
        self._losses[self.done] += loss.item()
        self._tokens[self.done] += sum(len(target.answer) for target in targets)


def train(
    run: Distillation, corpus: Corpus, made_for: Mapping[str, str], checkpoint: Checkpoint | None, progress: Progress
) -> None:
    """Makes the updates that are left, from the checkpoint on where there is one.

    made_for: what the run depends on. Raises CalibrationError for a checkpoint of another run.
    """
    if checkpoint is not None and (found := checkpoint.load(made_for)) is not None:
        position, state = found
        if position.digest != corpus.digest:
            raise CalibrationError(
                f"the checkpoint {checkpoint.path} was made for other records; delete it to start afresh"
            )
        run.restore(state, position.prompts)
        progress.resumed(run.done)
    loss = None
    progress.updates(run.done, run.steps, loss)
    while run.done < run.steps:
        loss = run.step()
        if checkpoint is not None and (run.done % checkpoint.every == 0 or run.done == run.steps):
            checkpoint.save(run.state(), Position(run.done, corpus.digest), made_for)
        progress.updates(run.done, run.steps, loss)
