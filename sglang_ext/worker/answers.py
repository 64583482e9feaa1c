"""What /kv/lift answers, and the namespace that lifted KV lives under."""

from __future__ import annotations

import logging
from typing import Any

from sglang_ext.errors import KVLiftError
from sglang_ext.identity import digest_fields
from sglang_ext.phases import Phases
from sglang_ext.transfer.selectors import Budget
from sglang_ext.worker.bodies import NO_DOCUMENTS, LinkedDocuments
from sglang_ext.worker.cost import Choice

logger = logging.getLogger(__name__)

APPLIED = "applied"
FALLBACK = "fallback_prefill"
UNSUPPORTED = "unsupported"

Answer = dict[str, Any]


def namespace_of(
    pack_digest: str, selector: str, budget: Budget, cache_salt: str | None, linked: LinkedDocuments = NO_DOCUMENTS
) -> str:
    """Where KV lifted in this way lives. Never shared with native KV, another method or another salt.

    linked: documents in what is lifted.
    """
    fields = [pack_digest, repr(budget), selector, "salted" if cache_salt else "", cache_salt or ""]
    if linked.documents:
        fields += [str(linked.recompute), *linked.documents]
    return "kvlift:" + digest_fields(fields)


def applied(
    prompt: int, prefix: int, lifted: int, recomputed: int, nbytes: int, phases: Phases, choice: Choice
) -> Answer:
    """prompt: T; prefix, lifted, recomputed: positions that were here, came with the block, and of these ran again.

    `chosen_rho` is the share of the prompt's positions that ran or will run in the target, the last one included.
    """
    if prefix + lifted == 0:
        return fallback("nothing to lift: the prompt has less than one page before its last token")
    return {
        "status": APPLIED,
        "reason": None,
        "tokens": {"prompt": prompt, "prefix": prefix, "lifted": lifted, "recomputed": recomputed},
        "chosen_rho": (recomputed + 1) / prompt,
        "bytes": nbytes,
        "ms": dict(phases.ms),
        "choice": choice.model_dump(),
    }


def fallback(reason: str) -> Answer:
    return {"status": FALLBACK, "reason": reason}


def declined(choice: Choice) -> Answer:
    """The answer where a native prefill is expected to be faster."""
    reason = (
        f"a native prefill is expected to be faster: {choice.native_ms:.1f} ms, the lift {choice.lift_ms:.1f} ms; "
        'ask with when "always" to lift nevertheless'
    )
    return {**fallback(reason), "choice": choice.model_dump()}


def explain(error: Exception) -> str:
    """The reason to answer with. A failure costs a native prefill, never the scheduler; one that
    kvlift did not raise itself is also logged in full."""
    if not isinstance(error, KVLiftError):
        logger.error("kvlift: an unexpected failure", exc_info=error)
    return f"{type(error).__name__}: {error}"
