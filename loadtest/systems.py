"""What is compared: each system answers one prompt, and is a configuration, not code.

system                              configuration
large native, small alone           `Chat` at the worker
cascade                             `Chat` at the router, `model` names the policy
lift at rho                         `LiftThenChat` at the large worker, the source prefilled beforehand
automatic choice                    the same, `when` is "faster"
prefilling that source              `Chat` at the small worker, the same prompts
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ValidationError

from loadtest.client import Answer, Client
from loadtest.errors import CallFailed
from loadtest.schedule import Arrival


class System(Protocol):
    """`name` is the rows' `system`. `send` runs in a greenlet per arrival."""

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raises `TargetDown` where no request could be sent."""

    def send(self, arrival: Arrival, prompt: str) -> Answer:
        """Sends one request and waits for its whole answer. Raises `CallFailed`."""


@dataclass(frozen=True)
class Chat:
    """One streamed chat request. `max_tokens` holds where an arrival does not say; `extra` goes into every body."""

    name: str
    client: Client
    model: str
    max_tokens: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        self.client.check()

    def send(self, arrival: Arrival, prompt: str) -> Answer:
        return self.client.chat(self.body(arrival, prompt))

    def body(self, arrival: Arrival, prompt: str) -> dict[str, Any]:
        """The chat completion body for one arrival."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": arrival.output_tokens or self.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


class _LiftReply(BaseModel):
    """A worker's answer to `/kv/lift`; keys that are not listed here are ignored."""

    status: str
    reason: str | None = None
    namespace: str | None = None
    ms: dict[str, float] = {}


@dataclass(frozen=True)
class LiftThenChat:
    """The paper's setting: lift what `source_url` has prefilled, then ask for it, both at the target (`chat`).

    A lift that is not applied ends in a native prefill, as it does behind the router, and the row says so. Phases in
    ms: the worker's own, and this side's `lift_call` and `chat_call` (to the first token), which add up to the time
    from sending to the first token.
    """

    chat: Chat
    source_url: str
    pack: str | None = None
    rho: float | None = None
    when: Literal["faster", "always"] = "always"
    lift_timeout_s: float = 300.0
    lease_s: float = 60.0

    @property
    def name(self) -> str:
        return self.chat.name

    def check(self) -> None:
        self.chat.check()

    def send(self, arrival: Arrival, prompt: str) -> Answer:
        started = time.perf_counter()
        body = self.chat.body(arrival, prompt)
        lift = self._lift(body)
        lifted = time.perf_counter()
        answer = self.chat.client.chat({**body, "extra_key": lift.namespace} if lift.namespace else body)
        calls = {"lift_call": (lifted - started) * 1000, "chat_call": (answer.first_token - lifted) * 1000}
        return replace(answer, lift=lift.status, lift_reason=lift.reason, phases_ms={**lift.ms, **calls})

    def _lift(self, request: dict[str, Any]) -> _LiftReply:
        body = {
            "request": request,
            "source": {"url": self.source_url},
            "pack": self.pack,
            "rho": self.rho,
            "when": self.when,
            "lease_s": self.lease_s,
            "timeout_s": self.lift_timeout_s,
        }
        try:
            return _LiftReply.model_validate(self.chat.client.post("/kv/lift", body))
        except (CallFailed, ValidationError) as error:
            return _LiftReply(status="fallback_prefill", reason=str(error))
