"""A request for an answer: what the client asked, and the body that a worker is sent for it.

The body is kept as the client wrote it; fields that the router does not know are forwarded. What differs between
the two endpoints is in `router.chat` and `router.completion`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from policies import Finish, RequestFacts
from router.errors import RequestError
from router.hints import Hints
from router.options import Options
from router.partial import Partial

_LIMITS = ("max_completion_tokens", "max_tokens")
_CONSTRAINTS = ("response_format", "regex", "ebnf", "json_schema")
"""Body keys of a grammar, which a worker would begin anew in the middle of the answer."""
MOST_CHOICES = 128
"""`n`: as many as OpenAI's API takes. A worker takes any number and makes room for every answer."""
MOST_LOGPROBS = 20
"""Alternatives per token, as in OpenAI's chat API; a worker has no limit of its own."""


@dataclass(frozen=True)
class Request(ABC):
    """One validated request. `body` is the client's, without `kvlift`."""

    path: ClassVar[str]
    """Where clients and workers post it."""

    body: dict[str, Any]
    options: Options
    hints: Hints | None
    model: str
    stream: bool
    wants_usage: bool  # a last chunk with the usage was asked for
    top_logprobs: int | None  # alternatives per token that the client asked for; None: no log-probabilities

    @classmethod
    def parse(cls, raw: bytes, hints: Hints | None = None) -> Self:
        """Raises `RequestError`."""
        body = json_object(raw)
        options = Options.parse(body.pop("kvlift", None))
        stream_options = typed(body, "stream_options", dict) or {}
        if "extra_key" in body:
            raise RequestError(
                "extra_key is set by the router, which names lifted KV with it; use cache_salt to keep caches apart",
                code="unsupported_parameter",
                param="extra_key",
            )
        bounded(body, "n", 1, MOST_CHOICES)
        return cls(
            body=body,
            options=options,
            hints=hints,
            model=_model(body),
            stream=bool(typed(body, "stream", bool)),
            wants_usage=bool(stream_options.get("include_usage")),
            top_logprobs=cls.asked_logprobs(body),
        )

    def for_worker(
        self, served: str, *, judged_by: int | None, namespace: str | None, partial: Partial | None = None
    ) -> dict[str, Any]:
        """The body for a worker that serves `served`.

        `judged_by`: alternatives per token that the policy reads, None for no log-probabilities.
        `namespace`: where the worker holds this prompt's lifted KV; the salt is folded into it already.
        `partial`: the answer that the worker goes on with, within what is left of the client's limits.
        """
        body = dict(self.body)
        body["model"] = served
        if self.stream:  # the usage is reported in the extension field whether asked for or not
            body["stream_options"] = {**(self.body.get("stream_options") or {}), "include_usage": True}
        if judged_by is not None:
            body |= self.with_logprobs(judged_by)
        if partial is not None:
            body |= self.going_on(partial.text)
            for key in (*_LIMITS, "min_tokens"):
                if type(body.get(key)) is int:
                    body[key] = max(body[key] - partial.tokens, 0 if key == "min_tokens" else 1)
        if namespace is not None:
            body.pop("cache_salt", None)
            body["extra_key"] = namespace
        return body

    def why_restart(self) -> str | None:
        """Why no tier can go on with an answer to this request that another one began; None where one can."""
        if not self.stream:
            return "a buffered answer comes whole"
        key = next((key for key in _CONSTRAINTS if self.body.get(key) not in (None, {"type": "text"})), None)
        return None if key is None else f"{key} binds the answer from its start"

    def answer_limit(self) -> int | None:
        """The most tokens the client lets the answer have; None where it set none."""
        return next((limit for key in _LIMITS if type(limit := self.body.get(key)) is int), None)

    def wants_json(self) -> bool:
        response_format = self.body.get("response_format")
        return isinstance(response_format, dict) and response_format.get("type") != "text"

    def refuse_choices(self, tiers: list[str]) -> None:
        """Raises `RequestError` where more is asked for than one answer: a policy judges one."""
        if found := self.several():
            key, needed = found
            raise RequestError(
                f"{key} is {json.dumps(self.body[key])[:80]}; a policy judges one answer, so {key} must be {needed}. "
                f"For more, set model to a tier, which is then asked directly: {', '.join(tiers)}",
                code="unsupported_value",
                param=key,
            )

    @classmethod
    @abstractmethod
    def asked_logprobs(cls, body: dict[str, Any]) -> int | None:
        """Alternatives per token that the client wants, None for no log-probabilities. Raises `RequestError`."""

    @abstractmethod
    def with_logprobs(self, judged_by: int) -> dict[str, Any]:
        """Body keys that ask for log-probabilities and alternatives, as many as client and policy want."""

    @abstractmethod
    def going_on(self, text: str) -> dict[str, Any]:
        """Body keys that make a worker go on after `text`, with which the answer has begun."""

    @abstractmethod
    def several(self) -> tuple[str, str] | None:
        """The body key that asks for more than one answer, and what it must be in place of that."""

    @abstractmethod
    def messages(self) -> list[Any]:
        """The conversation; empty where the endpoint knows none."""

    @abstractmethod
    def facts(self) -> RequestFacts:
        """What a policy may know of the request itself; what the router knows is not filled in."""

    @abstractmethod
    def for_check(self, served: str, answer: Finish, question: str, alternatives: int) -> dict[str, Any] | None:
        """The body that asks the worker of `answer` about it, in one token; None where it cannot be asked."""


def typed(body: dict[str, Any], key: str, kind: type) -> Any:
    """The value under `key`, or None. Raises `RequestError` where it is of another type."""
    value = body.get(key)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        message = f"{key} is {json.dumps(value)[:80]}; expected a JSON {kind.__name__}"
        raise RequestError(message, code="invalid_type", param=key)
    return value


def bounded(body: dict[str, Any], key: str, least: int, most: int) -> int | None:
    """The whole number under `key`, or None. Raises `RequestError` where it is another type or out of its range."""
    value: int | None = typed(body, key, int)
    if value is not None and not least <= value <= most:
        message = f"{key} is {value}; expected {least} to {most}"
        raise RequestError(message, code="invalid_value", param=key)
    return value


def json_object(raw: bytes) -> dict[str, Any]:
    """The object that a body is. Raises `RequestError`."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a JSON {type(body).__name__}; expected an object", code="invalid_json")
    return body


def _model(body: dict[str, Any]) -> str:
    model: str | None = typed(body, "model", str)
    if not model:
        raise RequestError("model is missing; GET /v1/models lists the names", code="missing_parameter", param="model")
    return model
