"""What the routes take and give, for the OpenAPI document.

Only what the router itself reads is described; every other key of a body is forwarded, so none is forbidden here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.options import Options
from router.request import MOST_CHOICES, MOST_LOGPROBS

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}},
        }
    },
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}],
        },
    },
}
_SHARED = {
    "stream": {"type": ["boolean", "null"]},
    "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {"type": ["boolean", "null"]}}},
    "max_tokens": {"type": ["integer", "null"], "minimum": 1},
    "n": {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": MOST_CHOICES,
        "description": "above 1 only where model is a tier",
    },
}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
    ]
}
_EVENT = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "description": "a chunk of the answer as JSON, or [DONE]"}},
}
_REFUSALS = {
    400: "the request is wrong",
    401: "no key, or a wrong one",
    404: "no such model",
    413: "the body is too large",
    429: "too many requests",
    502: "a worker failed",
    503: "not now",
    504: "a limit was reached",
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses` for errors, all in OpenAI's form."""
    content = {"application/json": {"schema": _ERROR}}
    return {status: {"description": _REFUSALS[status], "content": content} for status in statuses}


def chat(models: Sequence[str]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of the chat route. `models`: what a client may write there."""
    keys = {
        "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
        "logprobs": {"type": ["boolean", "null"]},
        "top_logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MOST_LOGPROBS},
    }
    return _route(models, keys, "messages", "chat.completion")


def completion(models: Sequence[str]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of the completion route."""
    keys = {"prompt": _PROMPT, "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": MOST_LOGPROBS}}
    return _route(models, keys, "prompt", "text_completion")


def document(tiers: Sequence[str]) -> dict[str, Any]:
    """FastAPI's `openapi_extra` of the route that adds a document."""
    keys = {
        "text": {"type": ["string", "null"], "description": "as it will stand in prompts"},
        "ids": {"type": ["array", "null"], "items": {"type": "integer"}, "description": "token ids, instead of a text"},
        "tier": {"type": ["string", "null"], "enum": [*tiers, None], "description": "null: every tier"},
        "method": {"type": ["string", "null"], "enum": ["plain", "packet", "sempic", "joint", None]},
        "ttl": {"type": ["number", "null"], "description": "seconds that it lives; null: until it is deleted"},
        "cache_salt": {"type": ["string", "null"]},
    }
    body = {"type": "object", "properties": keys}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": body}}}}


def _route(models: Sequence[str], keys: dict[str, Any], needed: str, kind: str) -> dict[str, Any]:
    model = {"type": "string", "enum": list(models), "description": "a policy, or a tier, which is then the only one"}
    body = {
        "type": "object",
        "required": ["model", needed],
        "properties": {"model": model, **_SHARED, **keys, "kvlift": Options.model_json_schema()},
    }
    answer = {
        "type": "object",
        "required": ["object", "model", "choices", "kvlift"],
        "properties": {"object": {"const": kind}, "choices": {"type": "array"}, "kvlift": {"type": "object"}},
    }
    told = {"application/json": {"schema": answer}, "text/event-stream": {"schema": _EVENT}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "the answer, streamed where `stream` is true", "content": told}},
    }
