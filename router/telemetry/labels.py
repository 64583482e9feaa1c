"""The words that may stand in a metric's label.

A closed set: whatever a worker, a client or a bug brings forth, the number of series stays what it is. Tiers, models,
workers and policies need no such list: they come from the config.
"""

from __future__ import annotations

import re

OTHER = "other"

_POLICIES = """
    always answer_pattern calls_spent confident empty_answer invalid_arguments invalid_json json_asked keyword language
    loop low_confidence never no_logprobs no_match no_signal no_verdict pattern permitted prompt_length refusal
    self_doubt share_spent target_busy target_down tier_busy tools unknown_tool verified
"""
_ROUTER = """
    aborted attempt_timeout breaker_open cancelled connect_failed connection_lost context_length draining
    first_token_timeout idle_timeout kv_hint last_tier lift_not_applied malformed max_calls no_conversation pinned queue_full
    queue_timeout self_check shadow sticky tenant_busy tier_down timeout total_timeout truncated
"""
_REFUSALS = """
    bad_answer body_too_large document_not_found invalid_api_key invalid_json invalid_type invalid_value missing_parameter model_not_found
    unsupported_parameter unsupported_value
"""
_STATUS = re.compile(r"upstream_([1-5])\d\d")

REASONS = frozenset((_POLICIES + _ROUTER + _REFUSALS).split())
PHASES = frozenset({"export", "transfer", "gather", "map", "score", "write", "recompute", "insert"})


def reason(word: str) -> str:
    """A reason of a policy, or the code of an error; HTTP statuses of workers by their first digit."""
    if word in REASONS:
        return word
    status = _STATUS.fullmatch(word)
    return f"upstream_{status[1]}xx" if status else OTHER


def phase(name: str) -> str:
    """A step of a lift."""
    return name if name in PHASES else OTHER
