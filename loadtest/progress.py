"""What a person sees of a long measurement: what goes on, how far it is, how long it still takes."""

from __future__ import annotations

from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress(Protocol):
    def show(self, what: str) -> None:
        """What is measured from now on."""

    def advance(self, units: float) -> None:
        """So much of the total is done."""

    def note(self, line: str) -> None:
        """A result, to stay on the screen."""


class RichProgress:
    """A bar of `total` units with the time left. A context manager."""

    def __init__(self, total: float, console: Console) -> None:
        columns = BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()
        self._bar = Bar(TextColumn("{task.description}"), *columns, console=console)
        self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bar.stop()

    def show(self, what: str) -> None:
        self._bar.update(self._task, description=what)

    def advance(self, units: float) -> None:
        self._bar.advance(self._task, units)

    def note(self, line: str) -> None:
        self._bar.console.print(line, highlight=False)
