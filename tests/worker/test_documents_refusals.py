"""Documents that cannot be: each a clear error, and nothing left behind."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest

from tests.worker.conftest import Fleet
from tests.worker.documents import add, ask, by_id, by_text, chat, item, plain, texts


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "either text or ids"),
        ({"text": " A.", "ids": [400]}, "either text or ids"),
        ({"text": ""}, "0 tokens"),
        ({"ids": []}, "0 tokens"),
        ({"ids": [400] * 9000}, "9000 tokens; expected 1 to 8191"),
        ({"ids": [100_000]}, "token 100000"),
        ({"ids": [-1]}, "token -1"),
        ({"text": " A.", "method": "sempic"}, "--documents-adapter"),
        ({"text": " A.", "method": "magic"}, "method"),
        ({"text": " A.", "ttl": 0}, "ttl"),
        ({"text": " A.", "tll": 1}, "tll"),
    ],
)
def test_a_malformed_document_is_a_400_that_says_what_is_wrong(fleet: Fleet, body: dict, named: str):
    reply = fleet.large.client.post("/v1/documents", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert named in error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("part", "status", "named"),
    [
        ({"type": "document"}, 400, "either an id or a text"),
        ({"type": "document", "id": "a", "text": "b"}, 400, "either an id or a text"),
        ({"type": "document", "name": "a"}, 400, "name"),
        ({"type": "document", "id": "doc-0123"}, 404, "doc-0123"),
        ({"type": "document", "id": "../../etc/passwd"}, 404, "passwd"),
        ({"type": "document", "text": ""}, 400, "0 tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_part_is_refused_before_anything_is_sent(
    fleet: Fleet, part: dict, status: int, named: str, stream: bool
):
    body = {"model": "large-served", **chat(item(0), [part], stream=stream)}
    reply = fleet.large.client.post("/v1/chat/completions", json=body)
    assert reply.status_code == status and named in reply.json()["error"]["message"]


def test_another_tenants_document_is_unknown(fleet: Fleet):
    """Case 44."""
    one = item(0)
    [first, *_] = texts(one)
    document = fleet.large.call("/v1/documents", text=first, cache_salt="a")["id"]
    body = {"model": "large-served", **chat(one, [by_id(document)])}
    for salt in ("b", None):
        reply = fleet.large.client.post("/v1/chat/completions", json={**body, "cache_salt": salt})
        assert reply.status_code == 404
        assert fleet.large.client.get(f"/v1/documents/{document}", params={"cache_salt": salt or ""}).status_code == 404
    assert ask(fleet.large, chat(one, [by_id(document)], cache_salt="a"))["documents"]["tokens"]["linked"]


def test_options_that_are_not_known_are_refused(fleet: Fleet):
    for options, named in (
        ({"recompute": -1}, "recompute"),
        ({"recompte": 1}, "recompte"),
        ({"method": "joint"}, "joint"),
    ):
        body = {"model": "large-served", **chat(item(0), [by_text(" A.")], documents=options)}
        reply = fleet.large.client.post("/v1/chat/completions", json=body)
        assert reply.status_code == 400 and named in reply.json()["error"]["message"]


def test_a_worker_that_compiles_nothing_by_itself_links_what_was_added(fleet: Fleet):
    one = item(1)
    [first, second, third] = texts(one)
    fleet.smol.call("/v1/documents", text=first)
    parts = [by_text(first), by_text(second), plain(third)]
    told = ask(fleet.smol, chat(one, parts, max_tokens=2))["documents"]
    assert [part["from"] for part in told["documents"]] == ["memory", "inline"]
    assert told["tokens"]["missed"] >= told["documents"][1]["tokens"]
    nothing = ask(fleet.smol, chat(one, [plain(first), by_text(second), plain(third)], max_tokens=2))["documents"]
    assert nothing["status"] == "fallback_prefill" and "first sight" in nothing["reason"]
    assert fleet.smol.counters()["documents_compiled"] == 0


def test_a_request_without_documents_is_left_as_it_is(fleet: Fleet):
    """Also one that speaks of documents, and one whose body is not JSON."""
    body = chat(item(0), [plain(' A "document".')])
    assert "documents" not in ask(fleet.large, body)
    assert "documents" not in ask(fleet.large, {**body, "documents": {"recompute": 3}})
    kind = {"content-type": "application/json"}
    for raw in (b'{"messages": [{"content": [{"type": "document"', b'["document"]', b'{"type": "document"}'):
        replies = [  # each over a connection of its own: SGLang ends the one that brought what is no object
            httpx.post(f"{fleet.large.url}/v1/chat/completions", content=one, headers=kind, timeout=60).status_code
            for one in (raw, raw.replace(b"document", b"somewhat"))
        ]
        assert replies[0] == replies[1] != 200


def test_a_prompt_over_the_context_gets_sglangs_own_refusal(fleet: Fleet):
    one = item(0)
    reply = fleet.large.client.post(
        "/v1/chat/completions",
        json={"model": "large-served", **chat(one, [by_text(texts(one)[0]), plain(" Anna has two." * 3000)])},
    )
    assert reply.status_code == 400 and "8192" in reply.text


def test_the_routes_ask_for_the_workers_key(fleet: Fleet):
    url = fleet.paged.url
    calls = [
        ("GET", "/v1/documents"),
        ("POST", "/v1/documents"),
        ("DELETE", "/v1/documents/doc-1"),
        ("POST", "/kv/link"),
        ("POST", "/kv/map"),
    ]
    for method, path in [*calls, ("GET", "/v1/documents/doc-1"), ("POST", "/v1/chat/completions")]:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            body = chat(item(0), [by_text(" A.")])
            assert httpx.request(method, url + path, headers=headers, json=body).status_code in (401, 403), path


def test_200_requests_with_aborts_and_a_flush_leak_nothing(fleet: Fleet, prompt):
    """Cases 37 to 40. SGLang's strict memory checks end a worker that has lost a slot."""
    rng = random.Random(0)
    items = [item(index, "6x1") for index in range(8)]
    kept = [add(fleet.paged, prompt(30, seed=number)) for number in range(4)]

    async def one(client: httpx.AsyncClient, number: int) -> str:
        asked = items[number % len(items)]
        parts = [by_text(text) for text in texts(asked)]
        rng.shuffle(parts)
        body = {"model": "paged-served", **chat(asked, parts, stream=rng.random() < 0.5, max_tokens=6)}
        body["documents"] = {"recompute": rng.choice([0, 0, 3])}
        try:
            limit = rng.choice([0.02, 0.1, 60, 60])
            if number % 20 == 7:
                link = {"input_ids": prompt(30, seed=number % 4) + [300 + number, 5], "documents": [kept[number % 4]]}
                return (await client.post("/kv/link", json=link, timeout=limit)).json()["status"]
            return str((await client.post("/v1/chat/completions", json=body, timeout=limit)).status_code)
        except httpx.TimeoutException:
            return "aborted"

    async def all_of_them() -> list[str]:
        headers = {"authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=fleet.paged.url, headers=headers) as client:
            gate = asyncio.Semaphore(8)

            async def gated(number: int) -> str:
                async with gate:
                    if number == 100:
                        await client.post("/flush_cache", params={"timeout": 20}, timeout=60)
                    return await one(client, number)

            return await asyncio.gather(*(gated(number) for number in range(200)))

    outcomes = asyncio.run(all_of_them())
    assert outcomes.count("200") > 50 and outcomes.count("aborted") > 5, outcomes
    fleet.paged.flush()
    fleet.paged.rest()
