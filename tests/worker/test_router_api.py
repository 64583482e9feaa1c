"""The router's API over real workers: continued answers, completions, sticky conversations, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from router.app import create_app
from router.config import Config
from sglang_ext.offline.family.tasks import TASKS, make_item
from tests.router.fake_worker import serving, until
from tests.worker.conftest import Fleet

QUESTIONS = [make_item(task, "test", index) for index in range(2) for task in TASKS]
FIFTH = {"method": "min_window", "threshold": -1e-9, "window": 5}
"""Leaves an answer at its fifth token, unless it is certain of every one."""


@contextmanager
def routing(**config: Any) -> Iterator[openai.OpenAI]:
    app = create_app(Config.model_validate({"default_policy": "always", **config}))
    with serving(app) as address:
        until(app.state.gateway.monitor.all_up)
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    """The small and the large model."""
    pairs = [{"source": "small", "target": "large", "pack": "tiny-small-to-large"}]
    tiers = [
        {"name": "small", "served": "small-served", "address": fleet.small.url},
        {"name": "large", "served": "large-served", "address": fleet.large.url},
    ]
    policies = {"always": {"method": "always"}, "fifth": FIFTH, "never": {"method": "never"}}
    with routing(tiers=tiers, policies=policies, lift={"pairs": pairs, "when": "always", "timeout_s": 60}) as client:
        yield client


@pytest.fixture(scope="module")
def itself(fleet: Fleet) -> Iterator[openai.OpenAI]:
    """The small model twice: it goes on with its own answers."""
    tiers = [{"name": name, "served": name, "address": fleet.small.url} for name in ("first", "again")]
    policies = {"always": {"method": "always"}, "fifth": FIFTH}
    with routing(tiers=tiers, policies=policies, escalation="continue") as client:
        yield client


def ask(client: openai.OpenAI, model: str, messages: list[dict[str, str]], **more: Any) -> Any:
    greedy = {"temperature": 0, "max_tokens": 48, **more}
    return client.chat.completions.create(model=model, messages=list(messages), **greedy)


def streamed(client: openai.OpenAI, model: str, messages: list[dict[str, str]], **more: Any) -> tuple[str, str, Any]:
    """Text, finish reason and record of a streamed answer."""
    text, finish, record = "", "", None
    for part in ask(client, model, messages, stream=True, **more):
        record = getattr(part, "kvlift", None) or record
        for choice in part.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    return text, finish, record


@pytest.mark.parametrize("policy", ["always", "fifth"])
@pytest.mark.parametrize("limit", [48, 9])
def test_a_model_that_goes_on_with_its_own_answer_says_what_it_would_have_said(itself, policy, limit):
    continued = 0
    for item in QUESTIONS:
        whole = ask(itself, "first", item.messages, max_tokens=limit)
        text, finish, record = streamed(itself, policy, item.messages, max_tokens=limit)
        assert (text, finish) == (whole.choices[0].message.content, whole.choices[0].finish_reason)
        first, *rest = record["attempts"]
        if first["outcome"] == "continued":
            continued += 1
            # The same tokens, not only the same text, went along and were found in the cache.
            assert rest[0]["tokens"]["prompt"] == whole.usage.prompt_tokens + first["tokens"]["completion"]
            assert rest[0]["tokens"]["cached"] >= whole.usage.prompt_tokens - 1
            assert first["tokens"]["completion"] + rest[0]["tokens"]["completion"] == whole.usage.completion_tokens
    assert continued


def test_a_partial_answer_is_lifted_with_its_prompt(client: openai.OpenAI, fleet: Fleet):
    """At full budget the large model goes on as it would natively."""
    for item in QUESTIONS:
        options = {"escalation": "continue", "lift": "require", "rho": 1.0}
        text, _, record = streamed(client, "always", item.messages, extra_body={"kvlift": options})
        first, last = record["attempts"]
        assert (first["outcome"], record["lift"]["status"]) == ("continued", "applied")
        assert record["lift"]["tokens"]["prompt"] == last["tokens"]["prompt"] == last["tokens"]["cached"] + 1
        fleet.large.flush()
        said, left = first["tokens"]["completion"], 48 - first["tokens"]["completion"]
        partial = ask(client, "small", item.messages, max_tokens=said).choices[0].message.content
        messages = [*item.messages, {"role": "assistant", "content": partial}]
        native = ask(client, "large", messages, extra_body={"continue_final_message": True}, max_tokens=left)
        assert text == partial + native.choices[0].message.content


PROMPT = "Question: Where does Anna live?\nAnswer:"


def test_a_completion_is_lifted_streamed_and_buffered(client: openai.OpenAI, fleet: Fleet):
    def complete(model: str, prompt: Any, **more: Any) -> Any:
        return client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=12, **more)

    native = complete("large", PROMPT)
    fleet.large.flush()
    lifted = complete("always", PROMPT, extra_body={"kvlift": {"lift": "require", "rho": 1.0}})
    assert lifted.kvlift["lift"]["status"] == "applied"
    assert lifted.kvlift["lift"]["tokens"]["prompt"] == lifted.usage.prompt_tokens == native.usage.prompt_tokens
    assert lifted.choices[0].text == native.choices[0].text
    parts = list(complete("always", PROMPT, stream=True))
    whole = complete("always", PROMPT)
    assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
    ids = list(range(300, 320))
    assert complete("always", ids).kvlift["lift"]["tokens"]["prompt"] == len(ids)


def test_a_judged_completion_has_its_log_probabilities_and_shows_those_that_were_asked_for(client: openai.OpenAI):
    asked = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    judged = client.completions.create(model="fifth", **asked)
    assert judged.kvlift["attempts"][0]["confidence"] is not None
    assert judged.choices[0].logprobs is None
    for top in (0, 2):
        pinned = client.completions.create(model="small", logprobs=top, **asked).choices[0].logprobs
        never = client.completions.create(model="never", logprobs=top, **asked).choices[0].logprobs
        assert never.tokens == pinned.tokens and never.top_logprobs == pinned.top_logprobs


def test_the_next_turn_is_sticky_and_finds_its_lifted_prefix(client: openai.OpenAI, fleet: Fleet):
    """Design, step 5, without the small worker and without another lift."""
    item = QUESTIONS[0]
    first = ask(client, "always", item.messages)
    assert first.kvlift["lift"]["status"] == "applied" and not first.kvlift["sticky"]
    messages = [
        *item.messages,
        first.choices[0].message.model_dump(),  # as clients send it back
        {"role": "user", "content": "Question: Where does Anna live?"},
    ]
    for _ in range(2):
        second = ask(client, "always", messages)
        assert second.kvlift["sticky"] and second.kvlift["lift"] is None
        (attempt,) = second.kvlift["attempts"]
        assert attempt["tier"] == "large"
        assert attempt["tokens"]["cached"] >= first.usage.prompt_tokens


def test_cases_13_and_14_every_token_has_its_log_probabilities_streamed_as_buffered(fleet: Fleet, monkeypatch):
    """The worker sends several tokens in one chunk."""
    monkeypatch.setenv("PAGED_KEY", "secret")
    paged = {"name": "paged", "served": "paged-served", "address": fleet.paged.url, "api_key_env": "PAGED_KEY"}
    policies = {
        "never": {"method": "never"},
        "gap": {"method": "margin", "threshold": 0.0},
        "always": {"method": "always"},
    }
    last = {"name": "large", "served": "large-served", "address": fleet.large.url}
    with routing(tiers=[paged, last], policies=policies) as client:
        for model in ("paged", "gap"):
            asked = {"logprobs": True, "top_logprobs": 3}
            whole = ask(client, model, QUESTIONS[0].messages, **asked)
            parts = list(ask(client, model, QUESTIONS[0].messages, stream=True, **asked))
            told = [c.logprobs.content for part in parts for c in part.choices if c.logprobs and c.logprobs.content]
            entries = [entry for content in told for entry in content]
            expected = whole.choices[0].logprobs.content
            assert max(map(len, told)) > 1
            assert len(entries) == len(expected) == whole.usage.completion_tokens
            for entry, other in zip(entries, expected, strict=True):
                assert entry.token == other.token and entry.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [top.token for top in entry.top_logprobs] == [top.token for top in other.top_logprobs]
                assert len(entry.top_logprobs) == 3
