"""Questions from the HTTP process to the scheduler, each with its answer; any number may be under way."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

from sglang.utils import TypeBasedDispatcher

from sglang_ext.worker.messages import KVReply


class Conversation:
    """One tokenizer manager's line to its scheduler."""

    def __init__(self, manager: Any) -> None:
        """Teaches the manager, which is mutated, to take replies."""
        self._manager = manager
        self._waiting: dict[str, asyncio.Future[dict[str, Any]]] = {}
        manager._result_dispatcher += TypeBasedDispatcher([(KVReply, self._on_reply)])

    async def ask(self, message: Any, timeout: float | None) -> dict[str, Any]:
        """Sends a message and waits for its reply. Raises TimeoutError."""
        # SGLang starts the loop that receives replies with its first request; ours may be that one.
        self._manager.auto_create_handle_loop()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[message.rid] = future
        try:
            self.tell(message)
            async with asyncio.timeout(timeout):
                return await future
        finally:
            del self._waiting[message.rid]

    def tell(self, message: Any) -> None:
        """Sends a message that has no reply."""
        self._manager._dispatch_to_scheduler(message)

    def _on_reply(self, reply: KVReply) -> None:
        future = self._waiting.get(reply.rid)
        if future is not None and not future.done():
            future.set_result(reply.body)


def new_rid() -> str:
    """A name for a message, which is also that of the lease that it may take."""
    return uuid.uuid4().hex


def scheduler_info() -> dict[str, Any]:
    """What the scheduler said of itself when it was ready (SchedulerSide.describe)."""
    from sglang.srt.entrypoints.http_server import get_global_state

    return get_global_state().scheduler_info["kvlift"]
