"""Documents in chat requests, on real workers and through the router."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import openai
import pytest

from router.app import create_app
from router.config import Config
from sglang_ext.documents.tasks import messages
from tests.router.fake_worker import serving, until
from tests.worker.conftest import PACK, Fleet
from tests.worker.documents import add, ask, by_id, by_text, chat, item, plain, said, texts
from tests.worker.servers import Worker, cached, first_logprobs, text
from tests.worker.test_lift import close

ITEMS = [item(index) for index in range(3)]


def events(worker: Worker, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a streamed answer, without the last, [DONE]."""
    request = {"model": f"{worker.name}-served", **body, "stream": True}
    with worker.client.stream("POST", "/v1/chat/completions", json=request) as reply:
        assert reply.status_code == 200
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(told: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for event in told for choice in event["choices"])


def shape(told: dict[str, Any]) -> dict[str, Any]:
    """What the field says, without times and the place where KV came from."""
    return {
        **{key: told[key] for key in ("status", "reason", "tokens")},
        "documents": [{key: one[key] for key in ("id", "tokens", "start")} for one in told["documents"]],
    }


def test_documents_stand_where_their_text_would_be(fleet: Fleet):
    """With all their tokens recomputed, the answer is that to the text; the prompt has the same tokens in any case."""
    for one in ITEMS:
        native = ask(fleet.large, {"messages": messages(one), "temperature": 0, "max_tokens": 48})
        fleet.large.flush()
        parts = [by_text(text) for text in texts(one)]
        exact = ask(fleet.large, chat(one, parts, documents={"recompute": 1000}))
        linked = ask(fleet.large, chat(one, parts))
        assert said(exact) == said(native)
        for answer in (exact, linked):
            told = answer["documents"]
            assert told["status"] == "applied", told
            assert answer["usage"]["prompt_tokens"] == native["usage"]["prompt_tokens"] == told["tokens"]["prompt"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == told["tokens"]["prompt"] - 1
        tokens = linked["documents"]["tokens"]
        assert tokens["linked"] == sum(part["tokens"] for part in linked["documents"]["documents"])
        assert tokens["missed"] == 0 and tokens["cached"] + tokens["linked"] + tokens["computed"] == tokens["prompt"]
        assert exact["documents"]["tokens"]["linked"] == 0


def test_every_order_of_the_same_documents_is_a_hit(fleet: Fleet):
    one = ITEMS[0]
    ids = [fleet.large.call("/v1/documents", text=text)["id"] for text in texts(one)]
    before = fleet.large.counters()
    for order in permutations(ids):
        answer = ask(fleet.large, chat(one, [by_id(document) for document in order]))
        told = answer["documents"]
        assert [part["id"] for part in told["documents"]] == list(order)
        assert [part["from"] for part in told["documents"]] == ["memory"] * 3
        assert said(answer)
    after = fleet.large.counters()
    assert after["document_hits"] - before["document_hits"] == 18
    assert after["compiled_positions"] == before["compiled_positions"]


def test_a_document_may_stand_twice(fleet: Fleet):
    one = ITEMS[1]
    [first, second, third] = texts(one)
    answer = ask(fleet.large, chat(one, [by_text(part) for part in (first, second, first, third, first)]))
    told = answer["documents"]
    starts = [part["start"] for part in told["documents"]]
    assert starts == sorted(set(starts)) and told["documents"][0]["id"] == told["documents"][2]["id"]
    assert told["tokens"]["linked"] == sum(part["tokens"] for part in told["documents"])


def test_text_and_id_name_the_same_document(fleet: Fleet):
    one = ITEMS[2]
    first, *others = texts(one)
    document = fleet.large.call("/v1/documents", text=first)["id"]
    told = [
        ask(fleet.large, chat(one, [part, *map(plain, others)]))["documents"]["documents"][0]
        for part in (by_id(document), by_text(first))
    ]
    assert [one["id"] for one in told] == [document] * 2 and told[1]["from"] == "memory"


def test_streamed_equals_buffered(fleet: Fleet):
    for one in ITEMS:
        body = chat(one, [by_text(text) for text in texts(one)], stream_options={"include_usage": True})
        told = events(fleet.large, body)
        fleet.large.flush()
        whole = ask(fleet.large, {key: body[key] for key in body if key != "stream_options"})
        assert streamed(told) == said(whole)
        assert [index for index, event in enumerate(told) if "documents" in event] == [0]
        assert shape(told[0]["documents"]) == shape(whole["documents"])
        assert told[-1]["usage"] == whole["usage"]


def test_tools_and_a_json_schema_work_as_without_documents(fleet: Fleet):
    one = ITEMS[0]
    parts = [by_text(text) for text in texts(one)]
    schema = {
        "type": "object", "properties": {"count": {"type": "integer", "enum": [1, 2]}}, "required": ["count"],
        "additionalProperties": False,
    }  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    exact = ask(fleet.large, chat(one, parts, response_format=wanted, documents={"recompute": 1000}))
    plainly = {"messages": messages(one), "temperature": 0, "max_tokens": 48, "response_format": wanted}
    assert said(exact) == said(ask(fleet.large, plainly))
    fleet.large.flush()
    linked = ask(fleet.large, chat(one, parts, regex=r'\{"count": [12]\}'))
    assert json.loads(said(linked))["count"] in (1, 2) and linked["documents"]["tokens"]["linked"]
    tool = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": schema}}
    with_tool = ask(fleet.large, chat(one, parts, tools=[tool]))
    without = ask(fleet.large, {"messages": messages(one), "max_tokens": 4, "tools": [tool]})
    assert with_tool["documents"]["tokens"]["linked"]
    assert with_tool["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]


def test_the_next_turn_finds_the_last_one_also_with_one_more_document(fleet: Fleet):
    one, other = ITEMS[0], ITEMS[1]
    first = chat(one, [by_text(text) for text in texts(one)])
    answer = ask(fleet.large, first)
    turn = {"role": "assistant", "content": said(answer)}
    question = [plain("Text:"), by_text(texts(other)[0]), plain(f"\nQuestion: {other.question}")]
    second = {**first, "messages": [*first["messages"], turn, {"role": "user", "content": question}]}
    tokens = ask(fleet.large, second)["documents"]["tokens"]
    assert tokens["cached"] >= answer["usage"]["prompt_tokens"] - 1
    assert tokens["linked"] > 0, "the new document is linked"


def test_many_at_once_give_what_each_gives_alone(fleet: Fleet):
    bodies = [chat(one, [by_text(text) for text in texts(one)]) for one in (item(index, "6x1") for index in range(8))]
    alone = [said(ask(fleet.large, body)) for body in bodies]
    fleet.large.flush()
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda body: ask(fleet.large, body), bodies))
    assert [said(answer) for answer in together] == alone
    assert {answer["documents"]["status"] for answer in together} == {"applied"}
    fleet.large.rest()


def test_a_linked_prompt_is_exported_and_lifted(fleet: Fleet, prompt):
    """The source holds it under a namespace of its own. At rho = 1 the map does not matter."""
    ids, first, question = prompt(40, seed=81), prompt(20, seed=82), prompt(9, seed=83)
    document = add(fleet.small, ids)
    whole = first + ids + question
    linked = fleet.small.call("/kv/link", input_ids=whole, documents=[document])
    fleet.small.generate(whole, tokens=1, extra_key=linked["namespace"])
    assert fleet.small.call("/kv/export", input_ids=whole)["tokens"] == 0
    exported = fleet.small.call("/kv/export", input_ids=whole, documents=[document])
    fleet.small.call("/kv/release", handle=exported["handle"])
    assert exported["tokens"] == len(whole)
    one = ITEMS[0]
    request = chat(one, [by_text(text) for text in texts(one)])
    ask(fleet.small, request)
    lift = {"source": {"url": fleet.small.url}, "pack": PACK.name, "when": "always", "timeout_s": 60}
    lifted = fleet.large.call("/kv/lift", request=request, rho=1.0, **lift)
    assert lifted["status"] == "applied", lifted
    assert lifted["tokens"]["lifted"] == lifted["tokens"]["prompt"] - 1
    answer = ask(fleet.large, {**request, "extra_key": lifted["namespace"]})
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == lifted["tokens"]["prompt"] - 1
    fleet.large.flush()
    assert said(answer) == said(ask(fleet.large, {"messages": messages(one), "temperature": 0, "max_tokens": 48}))
    other = fleet.large.call("/kv/lift", request={**request, "messages": messages(one)}, rho=1.0, **lift)
    assert other["status"] == "fallback_prefill" or other["namespace"] != lifted["namespace"]


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    """The `openai` client before a router with both workers."""
    config = Config.model_validate(
        {
            "tiers": [
                {"name": "small", "served": "small-served", "address": fleet.small.url},
                {"name": "large", "served": "large-served", "address": fleet.large.url},
            ],
            "lift": {
                "pairs": [{"source": "small", "target": "large", "pack": PACK.name}], "when": "always", "timeout_s": 60,
            },
            "policies": {"always": {"method": "always"}, "never": {"method": "never"}},
            "default_policy": "always",
        }
    )  # fmt: skip
    app = create_app(config)
    with serving(app) as address:
        until(app.state.gateway.monitor.all_up)
        yield openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize("stream", [False, True])
def test_the_router_passes_documents_on(client: openai.OpenAI, fleet: Fleet, stream: bool):
    one = ITEMS[1]
    body = chat(one, [by_text(text) for text in texts(one)])
    straight = ask(fleet.small, body)
    answer = client.chat.completions.create(model="never", stream=stream, **body)
    if stream:
        told = [event.model_dump() for event in answer]
        assert streamed(told) == said(straight)
        assert shape(told[0]["documents"])["documents"] == shape(straight["documents"])["documents"]
    else:
        assert answer.choices[0].message.content == said(straight)
        assert answer.documents["tokens"]["missed"] == 0 and answer.kvlift["tier"] == "small"


def test_an_escalated_request_with_documents_is_lifted(client: openai.OpenAI, fleet: Fleet):
    one = ITEMS[2]
    answer = client.chat.completions.create(model="always", **chat(one, [by_text(text) for text in texts(one)]))
    lift = answer.kvlift["lift"]
    assert answer.kvlift["tier"] == "large" and lift["status"] == "applied", lift
    assert lift["tokens"]["prefix"] + lift["tokens"]["lifted"] == lift["tokens"]["prompt"] - 1
    assert answer.choices[0].message.content


def test_lossless_where_nothing_is_lost(fleet: Fleet, prompt):
    """A document at the start of a prompt, on the Llama model too."""
    for worker in (fleet.large, fleet.smol):
        ids, question = prompt(60, seed=85), prompt(9, seed=86)
        document = add(worker, ids)
        linked = worker.call("/kv/link", input_ids=ids + question, documents=[document])
        ours, native = (worker.generate(ids + question, extra_key=key) for key in (linked["namespace"], None))
        assert cached(ours) == len(ids + question) - 1
        assert text(ours) == text(native) and close(first_logprobs(ours), first_logprobs(native))
