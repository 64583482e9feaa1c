"""The command line gathers the other packages' commands."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from router import cli

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@pytest.fixture
def run(monkeypatch):
    """Runs the command line with the commands of a made-up package."""
    alone = typer.Typer(help="Passes on what it does not know.")

    @alone.callback(invoke_without_command=True, context_settings=PASS_ON)
    def worker(context: typer.Context, model: Annotated[str, typer.Option()]) -> None:
        typer.echo(f"{model} {context.args}")

    group = typer.Typer()

    @group.command()
    def first() -> None:
        typer.echo("first of the group")

    @group.command()
    def second() -> None:
        typer.echo("second of the group")

    def plain(count: int = 1) -> None:
        typer.echo(f"plain {count}")

    module = types.ModuleType("made_up")
    module.alone, module.group, module.plain = alone, group, plain
    monkeypatch.setitem(sys.modules, "made_up", module)
    names = {"worker": "alone", "bench": "group", "doctor": "plain", "broken": "missing"}
    entries = [importlib.metadata.EntryPoint(n, f"made_up:{v}", cli.COMMAND_GROUP) for n, v in names.items()]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entries)
    return lambda *words: CliRunner().invoke(cli.build(), list(words))


def test_a_lone_callback_is_a_command_that_passes_unknown_arguments_on(run):
    said = run("worker", "--model", "m", "--tp-size", "2", "--flag", "word")
    assert said.output.strip() == "m ['--tp-size', '2', '--flag', 'word']"


def test_a_group_and_a_function_keep_their_shape(run):
    assert run("bench", "second").output.strip() == "second of the group"
    assert run("doctor", "--count", "3").output.strip() == "plain 3"


def test_a_command_that_cannot_be_loaded_says_so_and_takes_no_other_away(run):
    assert "Not available" in run("--help").output
    said = run("broken", "--any", "word")
    assert said.exit_code == 1 and "made_up:missing" in said.output
    assert run("doctor").exit_code == 0


def test_up_names_what_is_wrong_with_its_file(run, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("tiers: []\n")
    for command in ("up", "router"):
        said = run(command, "-c", str(file))
        assert said.exit_code == 1 and "c.yaml:1: tiers" in said.output
