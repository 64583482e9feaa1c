"""The command `kvlift trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WIDE = 200  # columns, where nobody says how wide the paper is


def trace(
    file: Annotated[Path, typer.Argument(help="what telemetry.traces.file names", exists=True, dir_okay=False)],
    trace_id: Annotated[str | None, typer.Argument(help="or its beginning; without it the latest")] = None,
) -> None:
    """Print a trace as a tree with durations in milliseconds."""
    from rich.console import Console

    from router.telemetry import trace_tree

    try:
        traces = trace_tree.read(file)
        found = trace_tree.tree(*traces.find(trace_id))
    except trace_tree.TraceError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    console = Console()
    (console if console.is_terminal else Console(width=_WIDE)).print(found)
    if traces.skipped:
        typer.echo(f"{traces.skipped} lines of {file} are no spans", err=True)
