"""Train one model of the family from random weights.

The run is a function of (model, seed, steps): rows depend on the step's number, learning rates and curriculum
on its share of all steps, and one thread does the arithmetic. A killed run goes on from its last checkpoint.
"""

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn import functional

from sglang_ext.offline.family.model import RECIPES, ModelName, Recipe, committed, model_config, save_model
from sglang_ext.offline.family.muon import Muon
from sglang_ext.offline.family.pairs import pair_rows
from sglang_ext.offline.family.sequences import Row, rows_at, stage_at
from sglang_ext.offline.family.tokenizer import build_tokenizer
from sglang_ext.offline.family.vocabulary import content_words

LOCAL_WINDOW = 8
"""Tokens that a local layer sees, itself included."""
WARMUP_STEPS = 50
REPORT_EVERY = 20
SAVE_EVERY = 100


def rate_at(step: int, steps: int, settle_from: float) -> float:
    """Factor on the learning rates: up, flat, then down in a straight line."""
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (steps * (1 - settle_from)))


class Trainer:
    """A model with its optimizers; ``step(n)`` must be called with n = 0, 1, 2, ..."""

    def __init__(self, recipe: Recipe, *, seed: int, steps: int, compiled: bool = True) -> None:
        from transformers import Qwen3ForCausalLM

        torch.manual_seed(seed)
        self.recipe, self.seed, self.steps = recipe, seed, steps
        self.tokenizer = build_tokenizer()
        self.words = [self._encode(f" {word}")[0] for word in content_words()]
        if recipe.start is None:
            self.model = Qwen3ForCausalLM(model_config(recipe, self.tokenizer))
        else:
            self.model = Qwen3ForCausalLM.from_pretrained(committed(recipe.start), dtype=torch.float32)
        self._body = torch.compile(self.model.model, dynamic=False) if compiled else self.model.model
        layers = self.model.model.layers
        matrices = [param for param in layers.parameters() if param.ndim == 2]
        others = [param for param in self.model.parameters() if not any(param is matrix for matrix in matrices)]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (Muon(matrices, recipe.matrix_lr), recipe.matrix_lr),
            (torch.optim.AdamW(others, recipe.other_lr, betas=(0.9, 0.99), weight_decay=0.0), recipe.other_lr),
        ]

    def step(self, step: int) -> tuple[float, float]:
        """Update once. Returns the mean loss (nats) and the accuracy over the trained tokens."""
        progress = step / self.steps
        rows = self._rows(step, progress)
        loss, accuracy = self._loss(rows, local=progress < self.recipe.settle_from)
        loss.backward()
        for optimizer, rate in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * rate_at(step, self.steps, self.recipe.settle_from)
            optimizer.step()
            optimizer.zero_grad()
        return loss.item(), accuracy

    def state(self) -> dict[str, Any]:
        """What a later process needs in order to go on."""
        return {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)

    def save(self, folder: Path) -> None:
        save_model(self.model, self.tokenizer, folder)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    def _rows(self, step: int, progress: float) -> list[Row]:
        if self.recipe.start is not None:
            return pair_rows(step, self.seed, self._encode)
        stage = stage_at(progress, self.recipe.stage_ends)
        return rows_at(step, stage, self.seed, self._encode, self.words, biographies=self.recipe.biographies)

    def _loss(self, rows: list[Row], *, local: bool) -> tuple[Tensor, float]:
        ids = torch.tensor([row.ids for row in rows])  # [rows, length]
        positions = torch.tensor([row.positions for row in rows])
        predicted = torch.tensor([row.trained for row in rows])[:, 1:]
        masks = self._masks(ids.shape[1], local=local)
        output = self._body(input_ids=ids, position_ids=positions, attention_mask=masks, use_cache=False)
        hidden = output.last_hidden_state  # [rows, length, hidden]
        logits = self.model.lm_head(hidden[:, :-1][predicted])  # [trained tokens, vocabulary]
        targets = ids[:, 1:][predicted]
        accuracy = (logits.argmax(-1) == targets).float().mean().item()
        return functional.cross_entropy(logits, targets), accuracy

    def _masks(self, length: int, *, local: bool) -> dict[str, Tensor | None]:
        """Mask per kind of layer. None is plain causal attention."""
        layers = self.recipe.local_layers
        self.model.config.layer_types[:layers] = ["sliding_attention" if local else "full_attention"] * layers
        if not local:
            return {"full_attention": None}
        distance = torch.arange(length)[:, None] - torch.arange(length)
        return {"full_attention": None, "sliding_attention": ((distance >= 0) & (distance < LOCAL_WINDOW))[None, None]}


def train(
    model: Annotated[ModelName, typer.Option(help="Which model.")],
    out: Annotated[Path, typer.Option(help="Folder for the finished model.")],
    seed: Annotated[int, typer.Option(help="Seed of weights and data.")] = 0,
    steps: Annotated[int | None, typer.Option(min=1, help="Length of the run; the recipe's by default.")] = None,
    compiled: Annotated[bool, typer.Option("--compile/--eager", help="Compiling takes minutes and pays.")] = True,
) -> None:
    """Train one model of the family as its recipe says and save it in bf16."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    torch.set_num_threads(1)  # so that the order of every sum is the same on every machine
    recipe = RECIPES[model]
    steps = steps or recipe.steps
    trainer = Trainer(recipe, seed=seed, steps=steps, compiled=compiled)
    checkpoint = out.with_name(f"{out.name}.{seed}.{steps}.checkpoint.pt")
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        trainer.restore(saved)
        done = saved["done"]
    columns = (TextColumn(model), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("left"))
    with Progress(*columns) as progress:
        bar = progress.add_task(model, total=steps, completed=done)
        for step in range(done, steps):
            loss, accuracy = trainer.step(step)
            progress.advance(bar)
            if (step + 1) % REPORT_EVERY == 0:
                progress.console.print(f"step {step + 1}: loss {loss:.3f}, answer tokens right {accuracy:.1%}")
            if (step + 1) % SAVE_EVERY == 0:
                _replace(checkpoint, {"done": step + 1, **trainer.state()})
    trainer.save(out)
    checkpoint.unlink(missing_ok=True)


def _replace(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint so that a kill leaves either the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


if __name__ == "__main__":
    typer.run(train)
