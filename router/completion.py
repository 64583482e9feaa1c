"""A request to /v1/completions: a prompt that is taken as it stands, without a chat template."""

from __future__ import annotations

from typing import Any, ClassVar

from policies import Finish, RequestFacts
from router.request import MOST_LOGPROBS, Request, bounded


class CompletionRequest(Request):
    """One prompt, a text or its token ids, and the text that follows it."""

    path: ClassVar[str] = "/v1/completions"

    @classmethod
    def asked_logprobs(cls, body: dict[str, Any]) -> int | None:
        return bounded(body, "logprobs", 0, MOST_LOGPROBS)

    def with_logprobs(self, judged_by: int) -> dict[str, Any]:
        return {"logprobs": max(judged_by, self.top_logprobs or 0)}

    def why_restart(self) -> str | None:
        if not isinstance(self.body.get("prompt"), str):
            return "the prompt is token ids, to which text cannot be added"
        return super().why_restart()

    def going_on(self, text: str) -> dict[str, Any]:
        return {"prompt": self.body["prompt"] + text}

    def several(self) -> tuple[str, str] | None:
        for key in ("n", "best_of"):
            if self.body.get(key) not in (None, 1):
                return key, "1"
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and not _are_ids(prompt):
            return "prompt", "one string or one list of token ids"
        return ("echo", "false") if self.body.get("echo") else None

    def messages(self) -> list[Any]:
        return []

    def facts(self) -> RequestFacts:
        prompt = self.body.get("prompt")
        text = prompt if isinstance(prompt, str) else None
        return RequestFacts(
            characters=None if text is None else len(text),
            messages=0,
            has_tools=False,
            wants_json=self.wants_json() or self.body.get("json_schema") is not None,
            text=text,
            prompt_tokens=len(prompt) if isinstance(prompt, list) else None,
            tool_names=(),
            answer_limit=self.answer_limit(),
        )

    def for_check(self, served: str, answer: Finish, question: str, alternatives: int) -> dict[str, Any] | None:
        return None  # a question is a turn, and here are none


def _are_ids(prompt: list[Any]) -> bool:
    return all(type(token) is int for token in prompt)
