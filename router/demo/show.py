"""The two halves of the demonstration, one after the other: four workers at once would not fit a small machine."""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from pathlib import Path
from typing import Any

from rich.console import Console

from router.config import Config, Health, Listen, Start, Tier, load_config
from router.demo.memory import PeakMemory
from router.demo.pair import load_pair
from router.demo.quality import show_quality
from router.demo.speed import show_speed
from router.up import Ready, run

EXAMPLE = Path(str(files("router"))) / "examples" / "laptop.yaml"

_HOW_TO_TALK = """\
[bold]Talk to it yourself[/]
  kvlift up -c {example}
  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{{"model": "kvlift", "messages": [{{"role": "user", "content": "..."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
  answer = client.chat.completions.create(model="kvlift", messages=[...])
  print(answer.choices[0].message.content, answer.kvlift["escalated"])
"""


def run_demo(results: Path, console: Console) -> None:
    """Runs both halves and writes their figures to `results`. Raises `KVLiftError`."""
    logging.getLogger("httpx").setLevel(logging.WARNING)
    memory = PeakMemory()
    found: dict[str, Any] = {}

    console.rule("Quality: the tiny family")
    example = load_config(EXAMPLE).model_copy(update={"listen": Listen(port=0)})

    async def quality(ready: Ready) -> None:
        with memory.watching(ready.worker_pids):
            found["quality"] = await show_quality(ready.url, console)

    run(example, console, quality)

    console.rule("Speed: the load pair")
    folder = load_pair(console)

    async def speed(ready: Ready) -> None:
        source, target = (tier.address or "" for tier in ready.config.tiers)
        with memory.watching(ready.worker_pids):
            found["speed"] = await show_speed(source, target, folder, console)

    run(_speed_config(folder), console, speed)

    found["peak_memory_gb"] = memory.peak_gb
    results.parent.mkdir(parents=True, exist_ok=True)
    results.write_text(json.dumps(found, indent=2) + "\n")
    console.print(f"All processes together held at most {memory.peak_gb:.1f} GB. Figures: {results}\n")
    console.print(_HOW_TO_TALK.format(example=EXAMPLE), highlight=False, soft_wrap=True)


def _speed_config(folder: Path) -> Config:
    room = {"max-total-tokens": 16384}
    return Config(
        listen=Listen(port=0),
        tiers=[
            Tier(name="source", served="load-source", start=Start(model=str(folder / "source"), args=room)),
            Tier(
                name="target",
                served="load-target",
                start=Start(
                    model=str(folder / "target"), packs=[str(folder / "pack")], args={**room, "allow-bench-pack": True}
                ),
            ),
        ],
        policies={"never": {"method": "never"}},
        default_policy="never",
        # A probe generates a token on each worker: rare enough not to meet many measurements.
        health=Health(interval_s=8),
    )
