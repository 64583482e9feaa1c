"""`kvlift up`: the workers of a config and the router before them, as one command that leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from router.app import create_app
from router.config import ALIAS, Config, Replica, Start, Tier
from router.gateway import Gateway
from router.serve import DrainingServer, address, bind
from router.supervisor import Spec, Supervisor

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class Ready:
    """Everything is up: the router at `url`, the workers at the addresses in `config`."""

    url: str
    config: Config
    gateway: Gateway
    worker_pids: list[int]


Work = Callable[[Ready], Awaitable[None]]
"""What to do once everything is up. All of it is stopped when this returns."""


def up(config: Config, console: Console) -> None:
    """Runs until SIGINT or SIGTERM. Raises `ConfigError`, or `SuperviseError` when a worker cannot be kept."""

    async def serve(ready: Ready) -> None:
        _print_how_to_call(ready, console)
        await asyncio.Event().wait()

    run(config, console, serve)


def run(config: Config, console: Console, work: Work) -> None:
    """Starts workers and router, does `work`, and stops every process again, also on SIGINT or SIGTERM.

    Raises `ConfigError`, `SuperviseError`, or what `work` raises.
    """
    run_folder = Path(tempfile.mkdtemp(prefix="kvlift-"))
    config, specs = plan(config, run_folder)
    server = DrainingServer(create_app(config), config.drain_s)
    listening = bind(config.listen)
    supervisor = Supervisor(specs, config.restart)
    # The server puts its own handlers over these while it runs. What comes later must not end this process
    # before its children; and a handler, unlike SIG_IGN, is not inherited by them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: log.warning("already stopping"))
    url = address(listening)  # now: the server closes the socket when it stops
    console.print(f"router: {url}/v1, ready once its workers are")
    console.print(f"worker logs: {run_folder}")
    try:
        asyncio.run(_serve(server, listening, url, supervisor, console, work))
    finally:
        supervisor.stop()
        console.print("all workers stopped")


def plan(config: Config, run_folder: Path) -> tuple[Config, list[Spec]]:
    """Gives each worker that has a `start` a free port: the config with its address, and how to run it."""
    tiers: list[Tier] = []
    specs: list[Spec] = []
    for tier in config.tiers:
        addresses: list[str | None] = []
        for index, replica in enumerate(tier.workers()):
            if replica.start is None:
                addresses.append(None)
                continue
            name, port = tier.worker_name(index), _free_port()
            traces = config.telemetry.traces
            joining = traces.worker_arguments(name) if traces else []
            command = _command(tier.served, replica.start, replica, port, joining)
            specs.append(Spec(name, command, run_folder / f"{name.replace('/', '_')}.log"))
            addresses.append(f"http://127.0.0.1:{port}")
        tiers.append(tier.at(addresses))
    return config.model_copy(update={"tiers": tiers}), specs


def _command(served: str, start: Start, replica: Replica, port: int, joining: list[str]) -> list[str]:
    command = [
        sys.executable, "-m", "router.cli", "worker", "--model", start.model,
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", served,
    ]  # fmt: skip
    for pack in start.packs:
        command += ["--pack", pack]
    if key := replica.api_key():
        command += ["--api-key", key]
    return command + joining + start.arguments()


async def _serve(
    server: DrainingServer, listening: socket.socket, url: str, supervisor: Supervisor, console: Console, work: Work
) -> None:
    async def work_when_ready() -> None:
        await _show_until_up(server.gateway, supervisor, console)
        await work(Ready(url, server.gateway.config, server.gateway, supervisor.pids()))

    tasks = [asyncio.create_task(supervisor.run()), asyncio.create_task(work_when_ready())]
    for task in tasks:
        task.add_done_callback(lambda _: server.leave())
    await server.serve(sockets=[listening])
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _show_until_up(gateway: Gateway, supervisor: Supervisor, console: Console) -> None:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        rows = {worker: progress.add_task(worker, total=1) for worker in gateway.monitor.by_worker}
        while not gateway.monitor.all_up():
            states = supervisor.states()
            for worker, row in rows.items():
                is_up = gateway.monitor[worker].up
                what = f"{'ready' if is_up else 'starting'} ({states.get(worker, 'not ours')})"
                progress.update(row, description=f"{worker}: {what}", completed=int(is_up))
            await asyncio.sleep(_LOOK_EVERY_S)
        for worker, row in rows.items():
            progress.update(row, description=f"{worker}: ready", completed=1)


def _print_how_to_call(ready: Ready, console: Console) -> None:
    body = f'{{"model": "{ALIAS}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    names = ", ".join(model["id"] for model in ready.gateway.routes.listing())
    console.print(f"ready: {ready.url}/v1  (model: {names})")
    call = f"curl {ready.url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    console.print(call, soft_wrap=True, highlight=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
