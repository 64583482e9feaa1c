"""The servers for a run: the load pair's workers and the router before them, started for one command.

The load comes from a process of its own, the same command with the addresses: the router runs in this one, and would
disturb the moments at which requests leave.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from loadtest.lineup import CALL_TIMEOUT_S
from loadtest.simulate import CAP
from policies.target_rate import TargetRate
from router.config import Argument, Config, Health, Lift, LiftPair, Limits, Listen, Restart, Start, Tier
from router.demo.pair import load_pair
from router.up import Ready, run

ESCALATED = 0.5
"""Share of the cascade's requests that its policy lets reach the target. Random weights are sure of nothing: a threshold
would escalate all or none."""

_PACK = "load-pair"
_SPARE = 1.2  # of the pool: the lifted and the native KV of some prompts are there together
_STOP_S = 15.0  # the load's process ends its requests and writes its report meanwhile
_PILOT = 4 * 512  # tokens, see `loadtest.mu`


def with_load_pair(arguments: Sequence[str], prompts: int, tokens: int, console: Console) -> int:
    """Starts everything, runs `kvlift loadtest ARGUMENTS --target ...` on it, and stops everything.

    prompts, tokens: so many prompts of that length fit into each worker's cache. Returns the exit code of that command.
    Raises `SuperviseError` where a worker dies or the pair cannot be made, and `ConfigError`.
    """
    folder = load_pair(console)
    codes: list[int] = []

    async def work(ready: Ready) -> None:
        source, target = (tier.address or "" for tier in ready.config.tiers)
        threads = ["--target-threads", str(target_threads()), "--source-threads", str(source_threads())]
        addresses = ["--target", target, "--source", source, "--router", ready.url]
        codes.append(await run_load([*arguments, *addresses, *threads, "--tokenizer", str(folder / "target")]))

    # Without this, each look at a worker's health is a request between those that are measured.
    os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    run(pair_config(folder, prompts, tokens), console, work)
    return codes[0] if codes else 128 + signal.SIGINT


def target_threads() -> int:
    """All cores: while the target computes, the source is idle in all systems but the cascade."""
    return len(os.sched_getaffinity(0))


def source_threads() -> int:
    return max(1, target_threads() // 2)


def pair_config(folder: Path, prompts: int, tokens: int) -> Config:
    """As the paper's scheduler: first come first served, at most 32 prompts in a batch, none of them cut."""
    args: dict[str, Argument] = {
        "schedule-policy": "fcfs",
        "prefill-max-requests": CAP,
        "chunked-prefill-size": -1,
        "max-prefill-tokens": max((CAP + 1) * tokens, 16_384),
        "max-total-tokens": int(_SPARE * prompts * tokens) + CAP * tokens + _PILOT,
        "max-running-requests": 8 * CAP,
        # SGLang would reckon it from the prefill tokens, for a GPU, and find less than nothing.
        "mem-fraction-static": 0.8,
    }
    return Config(
        listen=Listen(port=0),
        tiers=[
            Tier(
                name="source",
                served="load-source",
                start=Start(model=str(folder / "source"), args={**args, "workers-on-host": 2}),
            ),
            Tier(
                name="target",
                served="load-target",
                start=Start(
                    model=str(folder / "target"),
                    packs=[str(folder / "pack")],
                    args={**args, "workers-on-host": 1, "allow-bench-pack": True},
                ),
            ),
        ],
        lift=Lift(
            pairs=[LiftPair(source="source", target="target", pack=_PACK)],
            timeout_s=CALL_TIMEOUT_S,
            lease_s=CALL_TIMEOUT_S,
        ),
        policies={"share": TargetRate(rate=ESCALATED)},
        default_policy="share",
        # Nothing may be given up because it waits in a long queue: that queue is what is measured.
        limits=Limits(first_token_s=CALL_TIMEOUT_S, idle_s=CALL_TIMEOUT_S, attempt_s=CALL_TIMEOUT_S),
        health=Health(interval_s=5, timeout_s=60, misses=100),
        restart=Restart(attempts=0),  # a worker that died is another one afterwards: the run ends
    )


def run_in_time(pid: int) -> bool:
    """Lets a process run whenever it has something to do: the load shares its cores with the servers, needs little of
    them, and must not send late. Returns whether the system permits it (to root, or within RLIMIT_RTPRIO)."""
    try:
        os.sched_setscheduler(pid, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
    except PermissionError:
        return False
    return True


async def run_load(arguments: Sequence[str]) -> int:
    """The load's process; when this is cancelled, it is asked to stop and waited for."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "loadtest.cli", *arguments)
    if not run_in_time(process.pid):
        Console(stderr=True).print("kvlift: no real-time priority here: the generator may lag, which marks points invalid")
    try:
        return await process.wait()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_S):
                await process.wait()
        except TimeoutError:
            process.kill()
        raise
