"""The whole house: the real `openai` client, the router, two real workers and the lift between them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from io import StringIO

import openai
import pytest
from rich.console import Console

from router.app import create_app
from router.config import Config
from router.demo.quality import show_quality
from sglang_ext.offline.family.tasks import TASKS, make_item
from tests.router.fake_worker import serving, until
from tests.worker.conftest import Fleet

QUESTIONS = [make_item(task, "test", index) for index in range(3) for task in TASKS]


@pytest.fixture(scope="module")
def url(fleet: Fleet) -> Iterator[str]:
    config = Config.model_validate(
        {
            "tiers": [
                {"name": "small", "served": "small-served", "address": fleet.small.url},
                {"name": "large", "served": "large-served", "address": fleet.large.url},
            ],
            "lift": {
                "pairs": [{"source": "small", "target": "large", "pack": "tiny-small-to-large"}],
                "when": "always",  # models this small are prefilled faster than lifted
                "timeout_s": 60,
            },
            "policies": {"always": {"method": "always"}, "never": {"method": "never"}, "sure": {"method": "avg_logprob"}},
            "default_policy": "sure",
        }
    )
    app = create_app(config)
    with serving(app) as address:
        until(app.state.gateway.monitor.all_up)
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, model: str, messages, **more):
    return client.chat.completions.create(
        model=model, messages=list(messages), temperature=0, max_tokens=48, **more
    )  # fmt: skip


def test_an_escalated_request_is_lifted_and_answered_by_the_large_model(client: openai.OpenAI):
    for item in QUESTIONS:
        answer = ask(client, "always", item.messages)
        record = answer.kvlift
        assert record["escalated"] and record["tier"] == "large"
        assert record["lift"]["status"] == "applied", record["lift"]
        tokens = record["lift"]["tokens"]
        # What an earlier question left in the namespace, the shared template, is held; the rest is lifted.
        assert tokens["prefix"] + tokens["lifted"] == tokens["prompt"] - 1
        assert tokens["lifted"] >= tokens["recomputed"] > 0
        last = record["attempts"][-1]
        assert last["tokens"]["cached"] == tokens["prompt"] - 1
        assert answer.usage.prompt_tokens == tokens["prompt"]
        assert answer.choices[0].message.content


def test_streamed_equals_buffered(client: openai.OpenAI):
    item = QUESTIONS[0]
    whole = ask(client, "always", item.messages).choices[0].message.content
    parts = ask(client, "always", item.messages, stream=True)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == whole


def test_a_required_lift_at_full_budget_gives_the_large_models_own_answer(client: openai.OpenAI, fleet: Fleet):
    for item in QUESTIONS:
        native = ask(client, "large", item.messages).choices[0].message.content
        fleet.large.flush()
        options = {"kvlift": {"lift": "require", "rho": 1.0}}
        lifted = ask(client, "always", item.messages, extra_body=options)
        assert lifted.kvlift["lift"]["tokens"]["recomputed"] == lifted.kvlift["lift"]["tokens"]["lifted"]
        assert lifted.choices[0].message.content == native


def test_a_request_chooses_its_selector_and_budget(client: openai.OpenAI, fleet: Fleet):
    """Each way of lifting has a namespace of its own, so nothing of another one is found."""
    item = QUESTIONS[0]
    for options in ({"coverage": 0.5}, {"selector": "source_attention"}, {"selector": "random:4", "rho": 0.6}):
        lift = ask(client, "always", item.messages, extra_body={"kvlift": options}).kvlift["lift"]
        assert lift["status"] == "applied" and lift["tokens"]["prefix"] == 0
        assert {key: lift[key] for key in options} == options
        assert (lift["rho"] is None) == ("coverage" in options)
        assert lift["chosen_rho"] == (lift["tokens"]["recomputed"] + 1) / lift["tokens"]["prompt"]
        assert lift["choice"]["chosen"] == "lift"


def test_never_keeps_the_small_answer_and_the_large_worker_sees_nothing(client: openai.OpenAI):
    answer = ask(client, "never", QUESTIONS[0].messages)
    assert answer.kvlift["tier"] == "small" and not answer.kvlift["escalated"]
    assert [attempt["tier"] for attempt in answer.kvlift["attempts"]] == ["small"]


def test_the_next_turn_of_a_lifted_conversation_reuses_its_own_prefix(client: openai.OpenAI):
    """The namespace of the conversation already holds the first turn. A required lift is made where the turn would go
    straight to the large model without one (test_router_api.py)."""
    messages = list(QUESTIONS[0].messages)
    first = ask(client, "always", messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Question: Where does Anna live?"},
    ]
    second = ask(client, "always", messages, extra_body={"kvlift": {"lift": "require"}})
    lift = second.kvlift["lift"]
    assert lift["status"] == "applied"
    assert lift["tokens"]["prefix"] >= first.usage.prompt_tokens - 1


def test_the_demos_figures_are_counts_of_what_happened(url: str):
    shown = StringIO()
    figures = asyncio.run(show_quality(url, Console(file=shown, width=200)))
    assert set(figures) == {"n", "small_accuracy", "cascade_accuracy", "large_accuracy", "escalated", "lifts_applied"}
    assert figures["n"] == 12 and figures["large_accuracy"] >= 0.9
    assert figures["lifts_applied"] == figures["escalated"] <= 12
    assert figures["cascade_accuracy"] >= figures["small_accuracy"]
    assert shown.getvalue().count("lifted,") == figures["lifts_applied"]
