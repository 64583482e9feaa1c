"""One router in front of two scripted workers, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from router.app import create_app
from router.breaker import Breaker
from router.config import Config
from tests.router.fake_worker import FakeWorker, Script, capabilities, packs, serving, until

MESSAGES = [{"role": "user", "content": "Who are you?"}]


class House:
    """Small and large worker, and the router before them."""

    middle: FakeWorker  # in a house of three tiers

    def __init__(self, stack: ExitStack, wait: bool = True, **overrides: Any) -> None:
        self.small, self.large = FakeWorker("served-small"), FakeWorker("served-large")
        self.breakers: list[Breaker] = []
        self.reset()
        for worker in (self.small, self.large):
            worker.address = stack.enter_context(serving(worker.app()))
        self.app = create_app(self._config(overrides))
        self.breakers = [health.worker.breaker for health in self.gateway.monitor.by_worker.values()]
        self.url = stack.enter_context(serving(self.app))
        self.http = stack.enter_context(httpx.Client(base_url=self.url, timeout=20))
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="client-key", max_retries=0)
        if wait:
            until(self.gateway.monitor.all_up)

    @property
    def gateway(self) -> Any:
        return self.app.state.gateway

    def reset(self) -> None:
        """Both workers as they were at first: the small one is sure of itself, and the pair could lift."""
        self.small.reset(Script(words=["small", " says"], capabilities=capabilities("small")))
        self.large.reset(Script(words=["large", " says", " so"], capabilities=capabilities("large")))
        for breaker in self.breakers:
            breaker.reset()

    def ask(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        """A buffered request: a completion where there is a prompt, else a chat."""
        if "prompt" in fields:
            return self.http.post("/v1/completions", json={"model": "kvlift", **fields}, headers=headers)
        body = {"model": "kvlift", "messages": MESSAGES, **fields}
        return self.http.post("/v1/chat/completions", json=body, headers=headers)

    def stream(self, **fields: Any) -> tuple[httpx.Response, list[str]]:
        """A streamed request: the response and the data of its events."""
        response = self.ask(stream=True, **fields)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
        return response, lines

    def _config(self, overrides: dict[str, Any]) -> Config:
        tiers = [
            _tier("small", self.small, overrides.pop("small", {})),
            *([overrides.pop("middle")] if "middle" in overrides else []),
            _tier("large", self.large, overrides.pop("large", {})),
        ]
        base = {
            "tiers": tiers,
            "lift": {"pairs": [{"source": "small", "target": "large", "pack": "small-to-large"}]},
            "policies": {
                "sure": {"method": "avg_logprob", "threshold": -1.0},
                "worst": {"method": "min_window", "threshold": -1.0, "window": 1},
                "gap": {"method": "margin", "threshold": 0.5},
                "always": {"method": "always"},
                "never": {"method": "never"},
            },
            "default_policy": "sure",
            "health": {"interval_s": 0.1, "timeout_s": 2},
        }
        return Config.model_validate({**base, **overrides})


def _tier(name: str, worker: FakeWorker, changes: dict[str, Any]) -> dict[str, Any]:
    place = {} if "replicas" in changes else {"address": worker.address}
    return {"name": name, "served": worker.served, **place, **changes}


@pytest.fixture
def build() -> Iterator[Callable[..., House]]:
    """Makes a house with parts of its config replaced."""
    with ExitStack() as stack:
        yield lambda **overrides: House(stack, **overrides)


@pytest.fixture
def build_three(build) -> Iterator[Callable[..., House]]:
    """Makes a house of three tiers, `house.middle` between the two; each tier can lift to every later one."""
    middle = FakeWorker("served-middle")

    def make(**overrides: Any) -> House:
        tiers = ("small", "middle", "large")
        pairs = [("small", "middle"), ("small", "large"), ("middle", "large")]
        middle.reset(
            Script(words=["middle", " says"], capabilities=capabilities("middle", packs=packs("small-to-middle")))
        )
        lift = {"pairs": [{"source": s, "target": t, "pack": f"{s}-to-{t}"} for s, t in pairs]}
        tier = {"name": "middle", "served": "served-middle", "address": middle.address}
        house = build(**{"middle": tier, "lift": lift, **overrides})
        house.middle = middle
        large = capabilities("large", packs=packs("small-to-large", "middle-to-large"))
        house.large.script.capabilities = large
        house.gateway.monitor["large"].capabilities = None  # learned anew at the next probe
        until(lambda: all(house.gateway.monitor[name].capabilities for name in tiers))
        return house

    with serving(middle.app()) as middle.address:
        yield make


@pytest.fixture(scope="session")
def standing_house() -> Iterator[House]:
    with ExitStack() as stack:
        yield House(stack)


@pytest.fixture
def house(standing_house: House) -> House:
    """The usual config; the servers are shared by all tests, their scripts are not."""
    until(lambda: standing_house.gateway.idle and standing_house.gateway.monitor.all_up())
    standing_house.reset()
    return standing_house


@pytest.fixture(params=[False, True], ids=["buffered", "streamed"])
def stream(request: pytest.FixtureRequest) -> bool:
    """Both ways to ask, for laws that hold for both."""
    return bool(request.param)


def contents(lines: list[str]) -> str:
    """The text of a streamed answer."""
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    choices = [choice for event in events for choice in event.get("choices", [])]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def extension(lines: list[str]) -> dict[str, Any]:
    """The one extension field of a streamed answer."""
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    found = [event["kvlift"] for event in events if "kvlift" in event]
    assert len(found) == 1
    return found[0]
