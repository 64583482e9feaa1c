"""What SGLang calls in each of its processes (entry point group `sglang.srt.plugins`).

Without the settings of a kvlift worker in the environment this does nothing: an SGLang that merely has
kvlift installed is left as it is.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from sglang_ext.errors import KVLiftError
from sglang_ext.worker import checks
from sglang_ext.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

_SIDE = "kvlift"  # the attribute of SGLang's Scheduler, tree, ModelRunner and TokenizerManager that holds our half


def activate() -> None:
    """Registers the hooks of this process.

    Exits the process, with the reason, where they cannot work: SGLang logs and skips a plugin that
    raises, and would then serve without the lift (case 74).
    """
    if WorkerSettings.published() is None:
        return
    try:
        checks.require(checks.release_checks())
        _register_hooks()
    except KVLiftError as error:
        print(f"kvlift: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def _register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_ext.worker import messages
    from sglang_ext.worker.executor import extend_with_frontier
    from sglang_ext.worker.spans import exporter_for

    messages.register()
    hooks = dict(zip(checks.HOOKED, (
        (_open_scheduler_side, HookType.AFTER),
        (_step, HookType.AFTER),
        (_before_flush, HookType.BEFORE),
        (_describe, HookType.AFTER),
        (_open_http_side, HookType.AFTER),
        (extend_with_frontier, HookType.AROUND),
        (_before_batch, HookType.BEFORE),
        (_forward, HookType.AROUND),
        (_idle, HookType.AFTER),
        (_held_tokens, HookType.AFTER),
        (exporter_for, HookType.AROUND),
    ), strict=True))  # fmt: skip
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)


def _open_scheduler_side(_result: Any, scheduler: Any) -> None:
    from sglang.utils import TypeBasedDispatcher

    from sglang_ext.worker.scheduler_side import SchedulerSide

    checks.require(checks.live_checks())
    side = SchedulerSide(scheduler, WorkerSettings.published())
    setattr(scheduler, _SIDE, side)
    setattr(scheduler.tree_cache, _SIDE, side)  # SGLang's accounting knows the tree, not the scheduler
    setattr(scheduler.tp_worker.model_runner, _SIDE, side)
    scheduler._request_dispatcher += TypeBasedDispatcher(side.routes())
    logger.info("kvlift: live in scheduler process %d", os.getpid())


def _step(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    getattr(scheduler, _SIDE).step()


def _before_flush(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    getattr(scheduler, _SIDE).before_flush()


def _before_batch(scheduler: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    getattr(scheduler, _SIDE).before_batch(batch)


def _forward(original: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    side = getattr(runner, _SIDE, None)  # not while the worker starts
    known = None if side is None else side.known_outcome(forward_batch)
    return original(runner, forward_batch, *args, **kwargs) if known is None else known


def _idle(idle: bool, scheduler: Any, *_args: Any, **_kwargs: Any) -> bool:
    return idle and not getattr(scheduler, _SIDE).busy


def _held_tokens(held: int, observer: Any) -> int:
    """SGLang's memory checks count what sessions hold outside the tree; open lifts hold theirs so, too."""
    return held + int(getattr(observer.tree_cache, _SIDE).held_slots)


def _describe(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    return {**info, _SIDE: getattr(scheduler, _SIDE).describe()}


def _open_http_side(_result: Any, manager: Any) -> None:
    from sglang.srt.entrypoints.http_server import app

    from sglang_ext.worker.http_side import HttpSide

    checks.require(checks.live_checks())
    side = HttpSide(manager, WorkerSettings.published())
    setattr(manager, _SIDE, side)
    side.mount(app)
    logger.info("kvlift: live in HTTP process %d", os.getpid())
