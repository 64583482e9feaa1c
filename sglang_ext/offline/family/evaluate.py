"""Greedy accuracy of a model folder on the family's tasks, and how well its confidence tells right from wrong."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_ext.offline.family.tasks import TASKS, Item, Split, TaskName, is_correct, iter_items

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, Qwen3ForCausalLM

MAX_ANSWER_TOKENS = 48
BATCH = 50


@dataclass(frozen=True)
class Answer:
    """What a model said to one item."""

    text: str
    correct: bool
    logprob: float
    """mean log-probability of the answer's tokens, the end of turn included (nats)"""


@dataclass(frozen=True)
class Score:
    """A row of the table; the field names are the keys of the JSON output."""

    task: TaskName
    n: int
    accuracy: float
    logprob_right: float | None
    logprob_wrong: float | None
    auroc: float | None
    """probability that a right answer has a higher mean log-probability than a wrong one"""


def answer_items(
    model: "Qwen3ForCausalLM", tokenizer: "PreTrainedTokenizerBase", items: Sequence[Item]
) -> list[Answer]:
    """Answer greedily, in left-padded batches."""
    import torch

    answers = []
    for start in range(0, len(items), BATCH):
        batch = items[start : start + BATCH]
        prompts = [
            tokenizer.apply_chat_template(list(item.messages), add_generation_prompt=True, tokenize=False)
            for item in batch
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        with torch.inference_mode():
            output = model.generate(
                input_ids=inputs.input_ids,
                attention_mask=inputs.attention_mask,
                max_new_tokens=MAX_ANSWER_TOKENS,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = output.sequences[:, inputs.input_ids.shape[1] :]  # [batch, new tokens]
        logprobs = torch.stack(output.logits, dim=1).float().log_softmax(-1)  # [batch, new tokens, vocabulary]
        chosen = logprobs.gather(-1, tokens[..., None])[..., 0]
        for item, ids, scores in zip(batch, tokens.tolist(), chosen.tolist(), strict=True):
            length = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else len(ids)
            text = tokenizer.decode(ids[:length], skip_special_tokens=True)
            answers.append(Answer(text, is_correct(item, text), fmean(scores[:length])))
    return answers


def score(task: TaskName, answers: Sequence[Answer]) -> Score:
    """Summarise the answers to one task's items."""
    right = [answer.logprob for answer in answers if answer.correct]
    wrong = [answer.logprob for answer in answers if not answer.correct]
    return Score(
        task=task,
        n=len(answers),
        accuracy=len(right) / len(answers),
        logprob_right=fmean(right) if right else None,
        logprob_wrong=fmean(wrong) if wrong else None,
        auroc=auroc(right, wrong),
    )


def auroc(right: Sequence[float], wrong: Sequence[float]) -> float | None:
    """Share of (right, wrong) pairs in which the right one scores higher; ties count half."""
    if not right or not wrong:
        return None
    return fmean((r > w) + (r == w) / 2 for r in right for w in wrong)


def evaluate(
    model: Annotated[Path, typer.Argument(help="Model folder.", exists=True, file_okay=False)],
    split: Annotated[Split, typer.Option(help="Which items.")] = "test",
    count: Annotated[int, typer.Option(min=1, help="Items per task.")] = 500,
    seed: Annotated[int, typer.Option(help="Seed of the items.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the rows to this JSON file.")] = None,
) -> None:
    """Measure a model of the family: fp32 arithmetic on its bf16 weights, greedy, one prompt per item."""
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [
        score(task, answer_items(loaded, tokenizer, list(iter_items(task, split, count, seed=seed))))
        for task in track(TASKS, "answering")
    ]
    table = Table("task", "n", "accuracy", "mean logprob, right", "wrong", "AUROC", title=f"{model.name}, {split}")
    for row in rows:
        numbers = (row.logprob_right, row.logprob_wrong, row.auroc)
        table.add_row(
            row.task, str(row.n), f"{row.accuracy:.1%}", *("-" if x is None else f"{x:.3f}" for x in numbers)
        )
    Console().print(table)
    if out:
        out.write_text(json.dumps({"model": model.name, "split": split, "rows": [asdict(r) for r in rows]}, indent=2))


if __name__ == "__main__":
    typer.run(evaluate)
