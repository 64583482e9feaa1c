"""Progress of a command in several parts: a bar each, with an estimate of the time left."""

from __future__ import annotations

from itertools import count
from typing import Callable, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Bars:
    """On standard error; a context manager. `more`: columns behind the time left."""

    def __init__(self, *more: ProgressColumn) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), *more
        self._bar = Bar(*columns, console=Console(stderr=True))
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._bar.stop()

    def show(self, part: str, seen: int, wanted: int, note: str = "") -> None:
        """`seen` of `wanted` are done; the first call for a part adds its bar, `note` stands behind its name."""
        text = part + note
        if part not in self._tasks:
            self._tasks[part] = self._bar.add_task(text, total=wanted)
        self._bar.update(self._tasks[part], completed=seen, description=text)

    def counted(self, part: str, wanted: int) -> Callable[[], None]:
        """Adds a bar, and returns what is called once for each of `wanted` that is done."""
        done = count(1)
        self.show(part, 0, wanted)
        return lambda: self.show(part, next(done), wanted)

    def say(self, line: str) -> None:
        """Above the bars, to stay there."""
        self._bar.console.print(line)
