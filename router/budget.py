"""What one client request may still cost."""

from __future__ import annotations

import time

from router.config import Limits
from router.errors import Unavailable


class Budget:
    """What is left for one client request: time, and chat calls to workers."""

    def __init__(self, limits: Limits) -> None:
        self._max_calls = self._calls = limits.max_calls
        self.ends_at = time.monotonic() + limits.total_s

    def take_call(self) -> None:
        """Raises `Unavailable` when the calls are used up."""
        if not self.may_call():
            raise Unavailable(
                f"limits.max_calls is {self._max_calls}: so many chat calls were made and none answered",
                code="max_calls",
            )
        self._calls -= 1

    def may_call(self) -> bool:
        return self._calls > 0

    @property
    def calls_left(self) -> int:
        return self._calls

    @property
    def calls_used(self) -> int:
        return self._max_calls - self._calls

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()
