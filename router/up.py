"""`kvlift up`: the workers of a config and the router before them, as one command that leaves nothing behind."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from router.app import create_app
from router.config import ALIAS, Config, Tier
from router.gateway import Gateway
from router.serve import DrainingServer, address, bind
from router.supervisor import Spec, Supervisor

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.2


def up(config: Config, console: Console) -> None:
    """Runs until SIGINT or SIGTERM. Raises `ConfigError`, or `SuperviseError` when a worker cannot be kept."""
    run_folder = Path(tempfile.mkdtemp(prefix="kvlift-"))
    config, specs = plan(config, run_folder)
    server = DrainingServer(create_app(config), config.drain_s)
    listening = bind(config.listen)
    supervisor = Supervisor(specs, config.restart)
    # The server puts its own handlers over these while it runs. What comes later must not end this process
    # before its children; and a handler, unlike SIG_IGN, is not inherited by them.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: log.warning("already stopping"))
    console.print(f"worker logs: {run_folder}")
    try:
        asyncio.run(_serve(server, listening, supervisor, console))
    finally:
        supervisor.stop()
        console.print("all workers stopped")


def plan(config: Config, run_folder: Path) -> tuple[Config, list[Spec]]:
    """Gives each tier that has a `start` a free port: the config with its address, and how to run it."""
    tiers: list[Tier] = []
    specs: list[Spec] = []
    for tier in config.tiers:
        if tier.start is None:
            tiers.append(tier)
            continue
        port = _free_port()
        specs.append(Spec(tier.name, _command(tier, port), run_folder / f"{tier.name.replace('/', '_')}.log"))
        tiers.append(tier.model_copy(update={"address": f"http://127.0.0.1:{port}"}))
    return config.model_copy(update={"tiers": tiers}), specs


def _command(tier: Tier, port: int) -> list[str]:
    assert tier.start is not None
    command = [
        sys.executable, "-m", "router.cli", "worker", "--model", tier.start.model,
        "--host", "127.0.0.1", "--port", str(port), "--served-model-name", tier.served,
    ]  # fmt: skip
    for pack in tier.start.packs:
        command += ["--pack", pack]
    if key := tier.api_key():
        command += ["--api-key", key]
    return command + tier.start.arguments()


async def _serve(server: DrainingServer, listening: socket.socket, supervisor: Supervisor, console: Console) -> None:
    keeping = asyncio.create_task(supervisor.run())
    keeping.add_done_callback(lambda _: server.leave())
    telling = asyncio.create_task(_tell(server.gateway, supervisor, address(listening), console))
    await server.serve(sockets=[listening])
    telling.cancel()
    keeping.cancel()
    results = await asyncio.gather(keeping, telling, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _tell(gateway: Gateway, supervisor: Supervisor, url: str, console: Console) -> None:
    """Shows the workers until all are up, then how to call the router."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        rows = {tier: progress.add_task(tier, total=1) for tier in gateway.monitor.by_tier}
        while not gateway.monitor.all_up():
            states = supervisor.states()
            for tier, row in rows.items():
                is_up = gateway.monitor[tier].up
                what = "ready" if is_up else "starting"
                progress.update(
                    row, description=f"{tier}: {what} ({states.get(tier, 'not ours')})", completed=int(is_up)
                )
            await asyncio.sleep(_LOOK_EVERY_S)
        for tier, row in rows.items():
            progress.update(row, description=f"{tier}: ready", completed=1)
    body = f'{{"model": "{ALIAS}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    console.print(f"ready: {url}/v1  (model: {', '.join(model['id'] for model in gateway.routes.listing())})")
    console.print(
        f"curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'",
        soft_wrap=True,
        highlight=False,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
