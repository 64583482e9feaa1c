"""The command `kvlift`: the router's own commands, and those that the other packages bring.

A package brings commands through the entry point group `kvlift.commands`: each entry is a function or a
`typer.Typer`, under the entry's name, in a module that imports nothing heavy. A command imports what it needs
when it runs.
"""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from router.telemetry.cli import trace

if TYPE_CHECKING:
    import logging

    from router.config import Config

COMMAND_GROUP = "kvlift.commands"

ConfigFile = Annotated[Path, typer.Option("-c", "--config", help="the YAML file", exists=True, dir_okay=False)]


def main() -> None:
    """The console script."""
    build()(prog_name="kvlift")


def build() -> typer.Typer:
    """The whole command line, with what is installed now."""
    app = typer.Typer(
        no_args_is_help=True, add_completion=False, help="Small model first, hard requests lifted with their KV cache."
    )
    app.command("up")(_up)
    app.command("router")(_router)
    app.command("demo")(_demo)
    app.command("trace")(trace)
    config = typer.Typer(no_args_is_help=True, help="Look at a configuration.")
    config.command("check")(_check)
    config.command("schema")(_schema)
    app.add_typer(config, name="config")
    for entry in importlib.metadata.entry_points(group=COMMAND_GROUP):
        _add(app, entry)
    return app


def _add(app: typer.Typer, entry: importlib.metadata.EntryPoint) -> None:
    try:
        brought = entry.load()
    except Exception as error:  # one broken package must not take the other commands away
        any_words = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command(entry.name, help=f"Not available: {error!r}", context_settings=any_words)(_broken(entry, error))
        return
    if not isinstance(brought, typer.Typer):
        app.command(entry.name)(brought)
    elif (
        (alone := brought.registered_callback)
        and alone.callback
        and not brought.registered_commands
        and not brought.registered_groups
    ):
        # A group without commands is a command. As a group it would take the first argument that it passes on for
        # the name of a command.
        help_text = brought.info.help if isinstance(brought.info.help, str) else None
        app.command(entry.name, help=help_text, context_settings=alone.context_settings)(alone.callback)
    else:
        app.add_typer(brought, name=entry.name)


def _broken(entry: importlib.metadata.EntryPoint, error: Exception) -> Any:
    def command() -> None:
        _fail(f"kvlift {entry.name}: {entry.value} cannot be loaded: {error!r}; install the extra that brings it")

    return command


def _up(config: ConfigFile) -> None:
    """Start the workers of a config and the router, and keep them running."""
    from rich.console import Console
    from rich.logging import RichHandler

    from router.config import load_config
    from sglang_ext.errors import KVLiftError
    from router.up import up

    console = Console(stderr=True)
    try:
        loaded = load_config(config)
        # The handler writes the time itself.
        _log_with(loaded, RichHandler(console=console, show_path=False, markup=False), "%(message)s")
        up(loaded, console)
    except KVLiftError as error:
        _fail(str(error))


def _demo(
    results: Annotated[Path, typer.Option(help="where the figures go")] = Path("results/demo.json"),
) -> None:
    """Show both: hard questions lifted and answered, and how much sooner a lifted request gets its first token."""
    from rich.console import Console

    from router.demo import run_demo
    from sglang_ext.errors import KVLiftError

    try:
        run_demo(results, Console())
    except KVLiftError as error:
        _fail(str(error))


def _router(config: ConfigFile) -> None:
    """Run the router alone, before workers that run already."""
    import asyncio
    import logging

    from router.app import create_app
    from router.config import load_config
    from sglang_ext.errors import KVLiftError
    from router.serve import DrainingServer, address, bind

    try:
        loaded = load_config(config)
        _log_with(loaded, logging.StreamHandler(), "%(asctime)s %(levelname)s %(name)s %(message)s")
        server = DrainingServer(create_app(loaded), loaded.drain_s)
        listening = bind(loaded.listen)
    except KVLiftError as error:
        _fail(str(error))
    typer.echo(f"listening on {address(listening)}", err=True)
    asyncio.run(server.serve(sockets=[listening]))


def _check(file: Annotated[Path, typer.Argument(help="the YAML file")]) -> None:
    """Read a config as the router would, and say what is wrong with it."""
    from router.config import load_config
    from sglang_ext.errors import KVLiftError

    try:
        config = load_config(file)
        config.require_secrets()
    except KVLiftError as error:
        _fail(str(error))
    tiers = " -> ".join(tier.name for tier in config.tiers)
    typer.echo(
        f"{file}: good. tiers: {tiers}; policies: {', '.join(config.policies)}; default: {config.default_policy}"
    )


def _schema() -> None:
    """Print the JSON schema of a config, for editors: every key, what it means, its default."""
    import json

    from router.config import Config

    typer.echo(json.dumps(Config.model_json_schema(), indent=1))


def _log_with(config: Config, handler: logging.Handler, line: str) -> None:
    """`handler` and `line` are for text; JSON goes to standard error as it is."""
    import logging

    from router.telemetry.logs import JsonFormatter, TextFormatter

    if config.telemetry.logs == "json":
        handler = logging.StreamHandler()
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter(line))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    logging.getLogger("httpx").setLevel(logging.WARNING)  # one line per call to a worker is too many


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    main()
