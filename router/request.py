"""A chat request: what the client asked, and the body that a worker is sent for it.

The body is kept as the client wrote it; fields that the router does not know are forwarded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from policies import Finish, RequestFacts
from router.config import Selector
from router.errors import RequestError

_SHAPES_PROMPT = ("tools", "chat_template_kwargs", "reasoning_effort", "cache_salt", "lora_path", "priority", "user")
"""Body keys, beside the messages, on which a prompt, its place in a cache and its order of service depend."""


class Options(BaseModel):
    """The body key `kvlift`: what one request may decide for itself. Never forwarded."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    policy: str | None = None
    rho: float | None = Field(default=None, ge=0, le=1)
    coverage: float | None = Field(default=None, ge=0, le=1)
    selector: Selector | None = None
    lift: Literal["auto", "never", "require"] = "auto"  # require: whether it is expected to be faster or not
    debug: bool = False  # show the text of discarded attempts

    @model_validator(mode="after")
    def _one_budget(self) -> Options:
        if self.rho is not None and self.coverage is not None:
            raise ValueError("give either rho or coverage")
        return self

    def chooses_lift(self) -> bool:
        """Whether something is said of how to lift, which a request to one tier alone never does."""
        return self.lift == "require" or any(x is not None for x in (self.rho, self.coverage, self.selector))


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One validated request. `body` is the client's, without `kvlift`."""

    body: dict[str, Any]
    options: Options
    model: str
    stream: bool
    wants_usage: bool  # a last chunk with the usage was asked for
    top_logprobs: int | None  # what the client asked for: None without `logprobs`

    @classmethod
    def parse(cls, raw: bytes) -> ChatRequest:
        """Raises `RequestError`."""
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
        if not isinstance(body, dict):
            raise RequestError(f"the body is a JSON {type(body).__name__}; expected an object", code="invalid_json")
        options = _options(body.pop("kvlift", None))
        stream_options = _typed(body, "stream_options", dict) or {}
        if "extra_key" in body:
            raise RequestError(
                "extra_key is set by the router, which names lifted KV with it; use cache_salt to keep caches apart",
                code="unsupported_parameter",
                param="extra_key",
            )
        return cls(
            body=body,
            options=options,
            model=_model(body),
            stream=bool(_typed(body, "stream", bool)),
            wants_usage=bool(stream_options.get("include_usage")),
            top_logprobs=(_typed(body, "top_logprobs", int) or 0) if _typed(body, "logprobs", bool) else None,
        )

    def for_worker(self, served: str, *, judged_by: int | None, namespace: str | None) -> dict[str, Any]:
        """The body for a worker that serves `served`.

        `judged_by`: alternatives per token that the policy reads, None for no log-probabilities.
        `namespace`: where the worker holds this prompt's lifted KV; the salt is folded into it already.
        """
        body = dict(self.body)
        body["model"] = served
        if self.stream:  # the usage is reported in the extension field whether asked for or not
            body["stream_options"] = {**(self.body.get("stream_options") or {}), "include_usage": True}
        if judged_by is not None:
            body["logprobs"] = True
            if wanted := max(judged_by, self.top_logprobs or 0):
                body["top_logprobs"] = wanted
        if namespace is not None:
            body.pop("cache_salt", None)
            body["extra_key"] = namespace
        return body

    def for_check(self, served: str, answer: Finish, question: str, alternatives: int) -> dict[str, Any]:
        """The body that asks the worker of `answer` about it, in one token.

        The prompt is the answered one and its continuation, so that the worker has most of it cached. Nothing that
        steers sampling is taken over: the reply is neither JSON nor a tool call, and its log-probabilities are those
        at temperature 1, to which SGLang turns a greedy request.
        """
        body = {key: self.body[key] for key in _SHAPES_PROMPT if key in self.body}
        template = body.get("chat_template_kwargs") or {}
        messages = self.body.get("messages") or []
        return {
            **body,
            "model": served,
            "messages": [*messages, _said(answer), {"role": "user", "content": question}],
            "chat_template_kwargs": {**template, "enable_thinking": False},  # the one token is the reply
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": alternatives,
        }

    def facts(self) -> RequestFacts:
        """What a policy may know of the request itself; what the router knows is not filled in."""
        messages = self.body.get("messages")
        messages = [m for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        response_format = self.body.get("response_format")
        return RequestFacts(
            characters=sum(len(_text(message)) for message in messages),
            messages=len(messages),
            has_tools=bool(self.body.get("tools")),
            wants_json=isinstance(response_format, dict) and response_format.get("type") != "text",
            text=next((_text(message) for message in reversed(messages) if message.get("role") == "user"), None),
            tool_names=_tool_names(self.body.get("tools")),
            answer_limit=self.answer_limit(),
        )

    def refuse_choices(self, tiers: list[str]) -> None:
        """Raises `RequestError` for `n` above 1: a policy judges one answer."""
        n = self.body.get("n")
        if n is not None and n != 1:
            raise RequestError(
                f"n is {n!r}; a policy judges one answer, so n must be 1. "
                f"For more, set model to a tier, which is then asked directly: {', '.join(tiers)}",
                code="unsupported_value",
                param="n",
            )

    def answer_limit(self) -> int | None:
        """The most tokens the client lets the answer have; None where it set none."""
        limits = (self.body.get(key) for key in ("max_completion_tokens", "max_tokens"))
        return next((limit for limit in limits if type(limit) is int), None)


def _options(value: Any) -> Options:
    if value is None:
        return Options()
    try:
        return Options.model_validate(value)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        key = ".".join(["kvlift", *(str(part) for part in fault["loc"])])
        raise RequestError(
            f"{key}: {fault['msg']} (known keys: {', '.join(Options.model_fields)})", code="invalid_value", param=key
        ) from error


def _model(body: dict[str, Any]) -> str:
    model: str | None = _typed(body, "model", str)
    if not model:
        raise RequestError("model is missing; GET /v1/models lists the names", code="missing_parameter", param="model")
    return model


def _typed(body: dict[str, Any], key: str, kind: type) -> Any:
    """The value under `key`, or None. Raises `RequestError` where it is of another type."""
    value = body.get(key)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        message = f"{key} is {json.dumps(value)[:80]}; expected a JSON {kind.__name__}"
        raise RequestError(message, code="invalid_type", param=key)
    return value


def _text(message: dict[str, Any]) -> str:
    """The text of a message; its parts on lines of their own. Images and other parts have none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return "\n".join(part for part in parts if isinstance(part, str))


def _tool_names(tools: Any) -> tuple[str, ...] | None:
    """The names of the offered functions, none where no tool is offered; None where they cannot be read."""
    if not tools:
        return ()
    if not isinstance(tools, list):
        return None
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)]
    names = [function.get("name") for function in functions if isinstance(function, dict)]
    readable = [name for name in names if isinstance(name, str)]
    return tuple(readable) if len(readable) == len(tools) else None


def _said(answer: Finish) -> dict[str, Any]:
    """The complete answer as a message."""
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for place, call in enumerate(answer.tool_calls or ())
    ]
    message = {"role": "assistant", "content": answer.text}
    return {**message, "tool_calls": calls} if calls else message
