"""Held-out questions through the router: who answered, from which cache, and was it right?"""

from __future__ import annotations

from typing import Any

import httpx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_ext.offline.family.tasks import TASKS, Item, is_correct, make_item

QUESTIONS_PER_TASK = 6
ANSWER_TOKENS = 64


async def show_quality(url: str, console: Console) -> dict[str, Any]:
    """Asks each question through the cascade and of the large model alone; prints a table; returns the figures."""
    items = [make_item(task, "test", index) for index in range(QUESTIONS_PER_TASK) for task in TASKS]
    table = _table()
    small_right = cascade_right = large_right = escalated = applied = 0
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        answers = [await _ask(client, item, "kvlift") for item in track(items, "the cascade", console=console)]
        # Afterwards: what the large model has prefilled itself, a lift would only copy.
        alone = [await _ask(client, item, "large") for item in track(items, "large alone", console=console)]
        for item, answer, own in zip(items, answers, alone, strict=True):
            record, text = answer["kvlift"], _text(answer)
            first = record["attempts"][0]
            small_text = first.get("text", text)
            lift = record["lift"] or {}
            small_right += is_correct(item, small_text)
            cascade_right += is_correct(item, text)
            large_right += is_correct(item, _text(own))
            escalated += record["escalated"]
            applied += lift.get("status") == "applied"
            table.add_row(*_cells(item, small_text, first["confidence"], record["escalated"], text, lift))
    console.print(table)
    n = len(items)
    console.print(
        f"right: small alone {small_right}/{n}, cascade {cascade_right}/{n}, large alone {large_right}/{n}; "
        f"{escalated} escalated, {applied} of them lifted with their KV\n"
    )
    return {
        "n": n,
        "small_accuracy": small_right / n,
        "cascade_accuracy": cascade_right / n,
        "large_accuracy": large_right / n,
        "escalated": escalated,
        "lifts_applied": applied,
    }


async def _ask(client: httpx.AsyncClient, item: Item, model: str) -> dict[str, Any]:
    body = {
        "model": model,
        "messages": item.messages,
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "kvlift": {"debug": True},
    }
    reply = await client.post("/v1/chat/completions", json=body)
    reply.raise_for_status()
    return dict(reply.json())


def _text(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"] or ""


def _table() -> Table:
    table = Table(title="small first; where it is unsure, the large model takes over with the small model's KV")
    for column in ("question", "small model", "answer", "KV"):
        table.add_column(column)
    table.columns[3].justify = "right"
    return table


def _cells(
    item: Item, small_text: str, confidence: float | None, escalated: bool, text: str, lift: dict[str, Any]
) -> tuple[str, str, str, str]:
    sure = "-" if confidence is None else f"{confidence:.2f}"
    mark = "[green]right[/]" if is_correct(item, text) else "[red]wrong[/]"
    who = "[yellow]large[/]" if escalated else "small"
    kv = "-"
    if lift.get("status") == "applied":
        tokens = lift["tokens"]
        kv = f"{tokens['prefix']} held, {tokens['lifted']} lifted, {tokens['recomputed']} recomputed"
    elif lift:
        kv = lift["status"]
    return item.question, f"{small_text.strip()} ({sure})", f"{who}: {text.strip()} {mark}", kv
