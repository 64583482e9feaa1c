"""`/v1/documents` at the router, before scripted workers."""

from __future__ import annotations

import pytest

from tests.router.conftest import House

TEXT = {"text": " A fact."}
KEYS = {"auth": {"keys": [{"tenant": "a", "key_env": "KEY_A"}, {"tenant": "b", "key_env": "KEY_B"}]}}


@pytest.fixture
def house(build) -> House:
    return build()


@pytest.fixture
def tenants(build, monkeypatch: pytest.MonkeyPatch) -> House:
    for name in "AB":
        monkeypatch.setenv(f"KEY_{name}", f"key-of-{name.lower()}-0123456789")
    return build(**KEYS)


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer key-of-{name}-0123456789"}


def test_a_document_is_added_at_every_tier(house: House):
    reply = house.http.post("/v1/documents", json=TEXT)
    assert reply.status_code == 200, reply.text
    told = reply.json()
    assert told["id"] == "doc-8" and told["tokens"] == 3 and "bytes" not in told
    assert told["kvlift"] == {
        name: {"id": "doc-8", "bytes": 100, "ms": {"compile": 1.0}} for name in ("small", "large")
    }  # fmt: skip
    assert house.small.calls == house.large.calls == [TEXT]


@pytest.mark.parametrize("tier", ["large", "served-large"])
def test_or_at_the_one_that_is_named(house: House, tier: str):
    told = house.http.post("/v1/documents", json={**TEXT, "tier": tier}).json()
    assert list(told["kvlift"]) == ["large"] and not house.small.calls and house.large.calls == [TEXT]


def test_a_list_says_who_has_what(house: House):
    house.http.post("/v1/documents", json={"text": "x", "tier": "large"})
    house.http.post("/v1/documents", json={"text": "xy"})
    listed = house.http.get("/v1/documents").json()
    held = {one["id"]: one["kvlift"]["workers"] for one in listed["data"]}
    assert held == {"doc-1": ["large"], "doc-2": ["small", "large"]}
    small = house.http.get("/v1/documents", params={"tier": "small"}).json()
    assert [one["id"] for one in small["data"]] == ["doc-2"]


def test_a_document_is_shown_and_deleted_wherever_it_is(house: House):
    house.http.post("/v1/documents", json={**TEXT, "tier": "large"})
    assert house.http.get("/v1/documents/doc-8").json()["text"] == "x"
    assert house.http.delete("/v1/documents/doc-8").json()["kvlift"]["workers"] == ["large"]
    for method in ("GET", "DELETE"):
        reply = house.http.request(method, "/v1/documents/doc-8")
        assert reply.status_code == 404 and "doc-8" in reply.json()["error"]["message"]


def test_what_one_worker_refuses_is_told_beside_what_another_took(house: House):
    house.small.script.status = 500
    told = house.http.post("/v1/documents", json=TEXT).json()
    assert "500" in told["kvlift"]["small"]["error"] and told["kvlift"]["large"]["id"] == told["id"]
    house.large.script.status = 400
    reply = house.http.post("/v1/documents", json={**TEXT, "tier": "large"})
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "no"


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"tier": "middle", "text": "x"}', b'{"tier": 3, "text": "x"}'])
def test_a_malformed_body_is_a_400_and_no_worker_sees_it(house: House, body: bytes):
    reply = house.http.post("/v1/documents", content=body)
    assert reply.status_code == 400 and reply.json()["error"]["message"]
    assert not house.small.calls and not house.large.calls


def test_tenants_see_their_own_documents_only(tenants: House):
    """Case 44: the tenant is the salt under which a worker keeps a document."""
    http = tenants.http
    document = http.post("/v1/documents", json=TEXT, headers=of("a")).json()["id"]
    assert http.get(f"/v1/documents/{document}", headers=of("a")).status_code == 200
    assert http.get(f"/v1/documents/{document}", headers=of("b")).status_code == 404
    assert http.delete(f"/v1/documents/{document}", headers=of("b")).status_code == 404
    assert http.get("/v1/documents", headers=of("b")).json()["data"] == []
    assert len(http.get("/v1/documents", headers=of("a")).json()["data"]) == 1
    assert http.get(f"/v1/documents/{document}", params={"cache_salt": "x"}, headers=of("a")).status_code == 404
    for method, path in (("GET", "/v1/documents"), ("POST", "/v1/documents"), ("DELETE", f"/v1/documents/{document}")):
        assert http.request(method, path, json=TEXT).status_code == 401


def test_a_document_that_the_worker_does_not_know_is_the_clients_404(house: House):
    """No other tier is asked, and the worker's breaker does not count it."""
    house.small.script.status = 404
    house.small.script.error = {"error": {"message": "no document 'doc-8'", "code": "document_not_found"}}
    reply = house.ask()
    assert reply.status_code == 404 and "doc-8" in reply.json()["error"]["message"]
    assert not house.large.calls
    house.small.script.error = {"detail": "Not Found"}
    assert house.ask().status_code == 200 and len(house.large.calls) == 1


def test_document_parts_and_options_are_passed_on_as_they_came(house: House):
    content = [{"type": "document", "id": "doc-8"}, {"type": "document", "text": " A."}, {"type": "text", "text": "?"}]
    more = {"documents": {"recompute": 2}}
    assert house.ask(messages=[{"role": "user", "content": content}], **more).status_code == 200
    [call] = house.small.calls
    assert call["messages"][0]["content"] == content and call["documents"] == {"recompute": 2}
