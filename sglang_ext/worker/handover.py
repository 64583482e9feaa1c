"""Work whose result is a resource: nothing is lost where nobody waits for it any more."""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Coroutine, TypeVar

T = TypeVar("T")


async def unless_given_up(work: Coroutine[Any, Any, T], drop: Callable[[T], None]) -> T:
    """The work's result. Where the caller is cancelled, the work goes on to its end and `drop` gets the result."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(lambda done: None if done.cancelled() or done.exception() else drop(done.result()))
        raise
