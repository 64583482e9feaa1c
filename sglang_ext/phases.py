"""Where the time of one operation goes, by phase."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import Iterator


class Phases:
    """Adds up wall-clock milliseconds per phase name; a phase may be entered many times."""

    def __init__(self) -> None:
        self.ms: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ms[name] = self.ms.get(name, 0.0) + (time.perf_counter() - started) * 1e3
