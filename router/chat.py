"""A request to /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from policies import Finish, RequestFacts
from router.request import MOST_LOGPROBS, Request, bounded, typed

_SHAPES_PROMPT = ("tools", "chat_template_kwargs", "reasoning_effort", "cache_salt", "lora_path", "priority", "user")
"""Body keys, beside the messages, on which a prompt, its place in a cache and its order of service depend."""


class ChatRequest(Request):
    """Messages, and an answer that is the next one."""

    path: ClassVar[str] = "/v1/chat/completions"

    @classmethod
    def asked_logprobs(cls, body: dict[str, Any]) -> int | None:
        alternatives = bounded(body, "top_logprobs", 0, MOST_LOGPROBS) or 0
        return alternatives if typed(body, "logprobs", bool) else None

    def with_logprobs(self, judged_by: int) -> dict[str, Any]:
        wanted = max(judged_by, self.top_logprobs or 0)
        return {"logprobs": True, "top_logprobs": wanted} if wanted else {"logprobs": True}

    def why_restart(self) -> str | None:
        if self.body.get("continue_final_message"):
            return "continue_final_message is the client's own"
        return super().why_restart()

    def going_on(self, text: str) -> dict[str, Any]:
        """SGLang's way: the last message is the assistant's, and it is not ended."""
        messages = [*self.messages(), {"role": "assistant", "content": text}]
        return {"messages": messages, "continue_final_message": True}

    def several(self) -> tuple[str, str] | None:
        return ("n", "1") if self.body.get("n") not in (None, 1) else None

    def messages(self) -> list[Any]:
        messages = self.body.get("messages")
        return messages if isinstance(messages, list) else []

    def facts(self) -> RequestFacts:
        messages = [message for message in self.messages() if isinstance(message, dict)]
        return RequestFacts(
            characters=sum(len(_text(message)) for message in messages),
            messages=len(messages),
            has_tools=bool(self.body.get("tools")),
            wants_json=self.wants_json(),
            text=next((_text(message) for message in reversed(messages) if message.get("role") == "user"), None),
            tool_names=_tool_names(self.body.get("tools")),
            answer_limit=self.answer_limit(),
        )

    def for_check(self, served: str, answer: Finish, question: str, alternatives: int) -> dict[str, Any] | None:
        """The prompt is the answered one and its continuation, so that the worker has most of it cached.

        Nothing that steers sampling is taken over: the reply is neither JSON nor a tool call, and its
        log-probabilities are those at temperature 1, to which SGLang turns a greedy request.
        """
        body = {key: self.body[key] for key in _SHAPES_PROMPT if key in self.body}
        template = body.get("chat_template_kwargs") or {}
        return {
            **body,
            "model": served,
            "messages": [*self.messages(), said(answer), {"role": "user", "content": question}],
            "chat_template_kwargs": {**template, "enable_thinking": False},  # the one token is the reply
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": alternatives,
        }


def said(answer: Finish) -> dict[str, Any]:
    """The complete answer as a message."""
    calls = [
        {"id": f"call_{place}", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for place, call in enumerate(answer.tool_calls or ())
    ]
    message = {"role": "assistant", "content": answer.text}
    return {**message, "tool_calls": calls} if calls else message


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
