"""The hand-over of a prompt's KV cache from one tier's worker to the next one's.

A lift makes the next answer start sooner; it is never needed for a right one. So nothing in here raises for a
lift that did not happen: the outcome says why, and the caller asks the target natively.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ValidationError

from router.config import Lift
from router.errors import UpstreamError
from router.options import Options
from router.record import LiftRecord
from router.worker import Capabilities, Worker

PROTOCOL = 1
_NETWORK_S = 1.0  # beyond the worker's own timeout, so that its answer about it can still arrive


class LiftOutcome(NamedTuple):
    """`namespace` is set exactly when the lift was applied."""

    namespace: str | None
    record: LiftRecord


class _Reply(BaseModel):
    """The worker's answer to `/kv/lift`; keys that are not listed here are ignored."""

    status: Literal["applied", "fallback_prefill", "unsupported"]
    reason: str | None = None
    namespace: str | None = None
    tokens: dict[str, int] = {}
    rho: float | None = None
    coverage: float | None = None
    selector: str | None = None
    chosen_rho: float | None = None
    choice: dict[str, Any] | None = None
    bytes: int = 0
    ms: dict[str, float] = {}


def why_unsupported(source: Capabilities | None, target: Capabilities | None, pack: str | None) -> str | None:
    """Why this pair cannot lift with `pack` (a name or digest), or None where it can."""
    if pack is None:
        return "no pack is configured for this pair of tiers (lift.pairs)"
    for role, worker in (("source", source), ("target", target)):
        if worker is None:
            return f"the {role} worker has not told its capabilities (/kv/capabilities)"
        if worker.protocol != PROTOCOL:
            return f"the {role} worker speaks lift protocol {worker.protocol}; this router speaks {PROTOCOL}"
    assert source is not None and target is not None
    if source.tokenizer_digest != target.tokenizer_digest:
        return "the two models have different tokenizers"
    if source.template_digest != target.template_digest:
        return "the two models have different chat templates"
    loaded = next((p for p in target.packs if pack in (p.name, p.digest)), None)
    if loaded is None:
        return f"the target worker has not loaded the pack {pack!r}"
    if loaded.source_model_digest != source.model_digest:
        return f"the pack {pack!r} was made for another source model"
    if not loaded.accepted:
        return f"the target worker does not accept the pack {pack!r}: {loaded.reason or 'no reason given'}"
    return None


async def lift(
    config: Lift,
    source: Worker,
    target: Worker,
    pack: str,
    body: dict[str, Any],
    options: Options,
    seconds_left: float,
) -> LiftOutcome:
    """Asks `target` to take over the KV of `body`'s prompt from `source`.

    `body` is the chat request as `target` would be sent it natively; `options` overrule the config.
    """
    timeout_s = min(config.timeout_s, max(seconds_left, 0.0))
    salt = body.get("cache_salt")
    payload = {
        "request": body,
        "source": {"url": source.address, "api_key": source.api_key, "cache_salt": salt},
        "pack": pack,
        **_budget(config, options),
        "selector": options.selector or config.selector,
        "when": "always" if options.lift == "require" else config.when,
        "cache_salt": salt,
        "lease_s": config.lease_s,
        "timeout_s": timeout_s,
    }
    try:
        reply = _Reply.model_validate_json(await target.lift(payload, timeout_s + _NETWORK_S))
    except UpstreamError as error:
        return _failed(f"{error.reason}: {error}")
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        return _failed(f"bad_reply: {'.'.join(map(str, fault['loc']))}: {fault['msg']}")
    applied = reply.status == "applied"
    if applied and not reply.namespace:
        return _failed("bad_reply: applied without a namespace")
    report = reply.model_dump(exclude={"status", "reason", "namespace"})
    return LiftOutcome(reply.namespace if applied else None, LiftRecord(reply.status, reply.reason, report))


def _budget(config: Lift, options: Options) -> dict[str, float]:
    """The one budget that is asked for: a request's own comes before the config's."""
    if options.rho is not None:
        return {"rho": options.rho}
    coverage = config.coverage if options.coverage is None else options.coverage
    return {"rho": config.rho} if coverage is None else {"coverage": coverage}


def unsupported(reason: str) -> LiftOutcome:
    return LiftOutcome(None, LiftRecord("unsupported", reason))


def _failed(reason: str) -> LiftOutcome:
    return LiftOutcome(None, LiftRecord("fallback_prefill", reason))
