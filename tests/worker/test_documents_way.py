"""The way of a chat request with documents through the HTTP side: its parts, its body, and the answer's field."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sglang_ext.errors import DocumentError, UnknownDocument
from sglang_ext.worker.documents.layout import Budget, Standing
from sglang_ext.worker.documents.middleware import PATH, DocumentMiddleware
from sglang_ext.worker.documents.namespaces import ancestors, namespace_of
from sglang_ext.worker.documents.parts import document_parts, has_documents, with_texts
from sglang_ext.worker.pool import Where

TOLD = {"status": "applied", "tokens": {"prompt": 3}}


def document(**named: str) -> dict[str, str]:
    return {"type": "document", **named}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_texts_stand_in_the_places_of_their_documents_to_the_letter():
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    body = {
        "messages": [
            {"role": "system", "content": "S"},
            user([words("a"), document(id="1"), words("b "), document(text="2"), document(id="3")]),
            user([document(id="4"), image, words("c"), document(id="5")]),
            {"role": "assistant", "content": None},
            user([words("d"), words("e")]),
        ],
        "model": "m",
    }
    before = json.dumps(body)
    assert [part.id or part.text for part in document_parts(body)] == ["1", "2", "3", "4", "5"]
    made = with_texts(body, ["<1>", "<2>", "<3>", "<4>", "<5>"])
    assert [message["content"] for message in made["messages"]] == [
        "S", "a<1>b <2><3>", [words("<4>"), image, words("c<5>")], None, [words("d"), words("e")],
    ]  # fmt: skip
    assert made["model"] == "m" and json.dumps(body) == before, "the request itself is left as it is"


@pytest.mark.parametrize(
    "body", [{}, {"messages": "x"}, {"messages": [1, user("x"), user([1, "document", words("d")])]}]
)
def test_a_body_without_documents_has_none(body: dict[str, Any]):
    assert not has_documents(body) and document_parts(body) == [] and with_texts(body, []) == body


@pytest.mark.parametrize("part", [document(), document(id="1", text="2"), document(id="1", more="x")])
def test_a_malformed_part_is_an_error(part: dict[str, str]):
    with pytest.raises(ValidationError):
        document_parts({"messages": [user([part])]})


def through(raw: bytes, error: Exception | None = None, method: str = "POST", path: str = PATH) -> httpx.Response:
    """The answer to a request that goes through the middleware to an application that tells what it got."""

    async def link(body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        if error is not None:
            raise error
        return {**body, "linked": True}, TOLD

    async def chat(request: Request) -> Response:
        got = await request.body()
        assert int(request.headers["content-length"]) == len(got)
        told = {"got": got.decode()}
        if b'"refuse"' in got:
            return JSONResponse(told, 422)
        if b'"stream"' not in got:
            return JSONResponse(told)

        async def stream():
            yield b": comment\n\n"
            yield b"data: " + json.dumps(told).encode() + b"\n\n"
            yield b'data: {"last": 1}\n\ndata: [DONE]\n\n'

        return StreamingResponse(stream(), media_type="text/event-stream")

    routes = [Route(where, chat, methods=["GET", "POST", "PUT"]) for where in (PATH, "/other")]
    app = DocumentMiddleware(Starlette(routes=routes), link)

    async def call() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, content=raw)

    return asyncio.run(call())


def body_of(*parts: Any, **more: Any) -> bytes:
    return json.dumps({"messages": [user(list(parts))], **more}).encode()


def test_an_answer_tells_of_the_documents():
    reply = through(body_of(document(id="1")))
    assert reply.status_code == 200 and int(reply.headers["content-length"]) == len(reply.content)
    assert reply.json()["documents"] == TOLD and json.loads(reply.json()["got"])["linked"]


def test_the_first_event_of_a_stream_tells_of_the_documents():
    lines = [line for line in through(body_of(document(id="1"), stream="yes")).text.split("\n") if line]
    first, last = (json.loads(line.removeprefix("data: ")) for line in lines[1:3])
    assert lines[0] == ": comment" and lines[3] == "data: [DONE]"
    assert first["documents"] == TOLD and last == {"last": 1}


@pytest.mark.parametrize(
    "raw",
    [
        body_of(words("x")), body_of(words('a "document"')), b'{"messages": "document"}', b'["document"]',
        b'{"document"', b"",
    ],
)  # fmt: skip
def test_what_has_no_documents_passes_as_it_came(raw: bytes):
    assert through(raw).json() == {"got": raw.decode()}


def test_other_routes_and_methods_pass_as_they_came():
    raw = body_of(document(id="1"))
    assert through(raw, path="/other").json() == {"got": raw.decode()}
    assert through(raw, method="PUT").json() == {"got": raw.decode()}


def test_sglangs_own_refusal_stays_its_own():
    reply = through(body_of(document(id="1"), refuse=1))
    assert reply.status_code == 422 and list(reply.json()) == ["got"]


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UnknownDocument("none"), 404, "document_not_found"), (DocumentError("bad"), 400, 400),
        (TimeoutError(), 504, 504),
    ],
)  # fmt: skip
def test_an_error_becomes_openais_json(error: Exception, status: int, code: object):
    reply = through(body_of(document(id="1")), error)
    assert reply.status_code == status and reply.json()["error"]["code"] == code


def test_a_client_that_hangs_up_ends_the_linking():
    """Case 37. Nothing goes on to SGLang, and what links is cancelled, so that it can give up its job."""
    seen: list[str] = []

    async def link(body: dict[str, Any]) -> Any:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def never(*_: Any) -> None:
        seen.append("went on")

    left = [{"type": "http.request", "body": body_of(document(id="1"))}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return left.pop(0)

    scope = {"type": "http", "path": PATH, "method": "POST", "headers": []}
    asyncio.run(DocumentMiddleware(never, link)(scope, receive, never))
    assert seen == ["cancelled"]


def test_namespaces_tell_documents_places_budget_and_salt_apart():
    base, none, a, b = Where(), Budget(0, 0.3), Standing("a", 3), Standing("b", 9)
    spaces = [
        namespace_of([a, b], none, base), namespace_of([b, a], none, base), namespace_of([a], none, base),
        namespace_of([Standing("a", 4), b], none, base), namespace_of([a, b], Budget(1, 0.3), base),
        namespace_of([a, b], Budget(0, 0.5), base), namespace_of([a, b], none, Where(cache_salt="s")),
        namespace_of([a, b], none, Where("s")),
    ]  # fmt: skip
    assert len(set(spaces)) == len(spaces)


def test_ancestors_are_the_namespaces_of_the_first_documents_up_to_the_next_one():
    base, standing = Where(cache_salt="s"), [Standing("a", 3), Standing("b", 9), Standing("c", 20)]
    budget = Budget(2, 0.3)
    assert ancestors(standing, budget, base, 30) == [
        (base, 30),
        (Where(namespace_of(standing[:1], budget, base)), 9),
        (Where(namespace_of(standing[:2], budget, base)), 20),
    ]
