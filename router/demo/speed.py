"""Time to first token of the same prompt on the same worker: prefilled natively, and lifted."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

LENGTHS = (512, 1024)
REPEATS = 5
RHO = 0.3
COMPUTE = ("map", "score", "recompute")
"""Phases that run a model or a map; the last token, which the ordinary request asks for, is recomputed with the others.
All other phases move KV and talk HTTP."""


async def show_speed(source: str, target: str, folder: Path, console: Console) -> list[dict[str, Any]]:
    """Measures both alternately, the target's cache flushed between; prints a table; returns a row per length.

    source, target: addresses of the workers; folder: of the load pair. Milliseconds, medians of REPEATS.
    """
    vocabulary = json.loads((folder / "source" / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    rows = []
    async with httpx.AsyncClient(timeout=300) as client:
        with Progress(console=console) as progress:
            task = progress.add_task("measuring", total=len(LENGTHS) * (REPEATS + 1))
            for length in LENGTHS:
                runs = []
                for repeat in range(REPEATS + 1):
                    ids = [rng.randrange(vocabulary) for _ in range(length)]
                    run = await _pair(client, source, target, ids)
                    if repeat:  # the first one warms up
                        runs.append(run)
                    progress.advance(task)
                rows.append(_row(length, runs))
    _print(rows, console)
    return rows


async def _pair(client: httpx.AsyncClient, source: str, target: str, ids: list[int]) -> dict[str, Any]:
    await _first_token_ms(client, source, ids, None)
    await _flush(client, target)
    native_ms = await _first_token_ms(client, target, ids, None)
    await _flush(client, target)
    started = time.perf_counter()
    body = {"input_ids": ids, "source": {"url": source}, "rho": RHO, "when": "always", "timeout_s": 120}
    lift = (await client.post(f"{target}/kv/lift", json=body)).raise_for_status().json()
    if lift["status"] != "applied":
        raise RuntimeError(f"the lift was not applied: {lift['reason']}")
    lifted_ms = (time.perf_counter() - started) * 1000
    token_ms = await _first_token_ms(client, target, ids, lift["namespace"])
    phases = {name: ms for name, ms in lift["ms"].items() if name != "total"}
    phases["http"] = lifted_ms - sum(phases.values())
    phases["request"] = token_ms
    return {"native": native_ms, "lift": (time.perf_counter() - started) * 1000, "phases": phases}


async def _first_token_ms(client: httpx.AsyncClient, worker: str, ids: list[int], namespace: str | None) -> float:
    """From the request to the first event of a streamed answer of one token."""
    body: dict[str, Any] = {
        "input_ids": ids,
        "stream": True,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
    }
    if namespace:
        body["extra_key"] = namespace
    started = time.perf_counter()
    first: float | None = None
    async with client.stream("POST", f"{worker}/generate", json=body) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if line and first is None:
                first = (time.perf_counter() - started) * 1000
    assert first is not None
    return first


async def _flush(client: httpx.AsyncClient, worker: str) -> None:
    (await client.post(f"{worker}/flush_cache", params={"timeout": 30})).raise_for_status()


def _row(length: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = list(runs[0]["phases"])
    return {
        "tokens": length,
        "rho": RHO,
        "native_ttft_ms": median(run["native"] for run in runs),
        "lift_ttft_ms": median(run["lift"] for run in runs),
        "ratio": median(run["lift"] / run["native"] for run in runs),
        "phases_ms": {name: median(run["phases"][name] for run in runs) for name in names},
    }


def _print(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"time to first token, ms, medians of {REPEATS}; random weights: the text is noise, the times are real")
    for column in ("tokens", "native", "lifted", "ratio", *COMPUTE, "overhead"):
        table.add_column(column, justify="right")
    for row in rows:
        phases = row["phases_ms"]
        rest = sum(ms for name, ms in phases.items() if name not in COMPUTE)
        cells = [row["native_ttft_ms"], row["lift_ttft_ms"], *(phases[name] for name in COMPUTE), rest]
        shown = [f"{cell:,.0f}" for cell in cells]
        table.add_row(str(row["tokens"]), *shown[:2], f"{row['ratio']:.2f}", *shown[2:])
    console.print(table)
    for row in rows:
        listed = ", ".join(f"{name} {ms:.0f}" for name, ms in row["phases_ms"].items())
        console.print(f"{row['tokens']} tokens: {listed}")
    console.print()
