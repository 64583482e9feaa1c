"""The page at `/`: what it may load, what it is told, and what it does in a browser."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.resources import files

import pytest

from tests.router.fake_worker import UNSURE, applied, until

KEYS = {"one": "first-key-4711", "two": "second-key-4711"}
AUTH = {"keys": [{"tenant": t, "key_sha256": hashlib.sha256(k.encode()).hexdigest()} for t, k in KEYS.items()]}
OWN = ("/", "/page/page.js", "/page/page.css")


def bearer(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


@pytest.mark.parametrize("path", OWN)
def test_the_page_is_served_to_everybody_and_may_load_nothing_of_others(build, path):
    house = build(auth=AUTH)
    reply = house.http.get(path)
    assert reply.status_code == 200
    policy = dict(part.strip().partition(" ")[::2] for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert reply.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("name", ["index.html", "page.js", "page.css"])
def test_the_page_names_no_address_outside(name):
    text = files("router.page").joinpath(name).read_text()
    assert not re.search(r"(https?:)?//[a-z]", text)
    assert "innerHTML" not in text and "localStorage" not in text and "sessionStorage" not in text
    assert "cookie" not in text and "style=" not in text and "onclick" not in text


def test_status_tells_tiers_policies_totals_and_decisions(build):
    house = build()
    house.ask()
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    response, _ = house.stream()
    house.large.script.status = 500
    house.ask(model="large")
    status = house.http.get("/status").json()
    assert [(tier["name"], tier["served"], tier["workers"][0]["up"]) for tier in status["tiers"]] == [
        ("small", "served-small", True),
        ("large", "served-large", True),
    ]
    assert {"name": "sure", "method": "avg_logprob", "default": True} in status["policies"]
    assert status["totals"] == {"requests": 3, "escalated": 1, "lifted": 1, "failed": 1, "cancelled": 0}
    assert [(d["tier"], d["path"], d["outcome"], d["reason"]) for d in status["decisions"]] == [
        ("large", "pinned", "failed", "upstream_500"),
        ("large", "lifted", "answered", "low_confidence"),
        ("small", "kept", "answered", "confident"),
    ]
    lifted = status["decisions"][1]
    assert lifted["request_id"] == response.headers["x-request-id"] and lifted["lift"] == "applied"
    assert 0 < lifted["ms"]["ttft"] <= lifted["ms"]["total"]


def test_decisions_are_bounded(build):
    house = build(telemetry={"decisions": 3})
    for _ in range(5):
        house.ask()
    status = house.http.get("/status").json()
    assert (len(status["decisions"]), status["totals"]["requests"]) == (3, 5)


def test_status_and_metrics_need_a_key_and_a_tenant_sees_its_own_decisions(build):
    house = build(auth=AUTH)
    body = {"model": "kvlift", "messages": [{"role": "user", "content": "zanzibar"}]}
    for path in ("/status", "/metrics"):
        assert house.http.get(path).status_code == 401
        assert house.http.get(path, headers={"authorization": "Bearer wrong"}).status_code == 401
        assert house.http.get(path, headers=bearer("one")).status_code == 200
    for _ in range(2):
        house.http.post("/v1/chat/completions", json=body, headers=bearer("one"))
    house.http.post("/v1/chat/completions", json=body, headers=bearer("two"))
    told = {tenant: house.http.get("/status", headers=bearer(tenant)) for tenant in KEYS}
    assert [len(told[tenant].json()["decisions"]) for tenant in ("one", "two")] == [2, 1]
    assert not any("zanzibar" in reply.text or "4711" in reply.text for reply in told.values())


@pytest.fixture(scope="module")
def chromium() -> Iterator[object]:
    from tests.router import browser

    if browser.CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    with browser.browser() as page:
        yield page


@pytest.fixture
def page(chromium):
    """A tab of desktop size, light, with nothing noted yet."""
    chromium.size(1280, 900)
    chromium.requests.clear()
    chromium.complaints.clear()
    return chromium


def said(page) -> list[str]:
    return page("[...document.querySelectorAll('#messages .text')].map(e => e.textContent)")


def chat(page, text: str) -> None:
    """Sends a message as a person would, and waits for the end of the answer."""
    page.type("#text", text)
    page.press_enter()
    until(lambda: page("document.querySelectorAll('#messages .assistant').length > 0"))
    until(lambda: page("document.querySelectorAll('#messages .pending').length === 0"))


def test_a_person_chats_and_sees_who_answered_and_why(build, page):
    house = build()
    page.open(house.url)
    until(lambda: page("document.getElementById('state').textContent") == "ready")
    chat(page, "Hello <b>you</b>")
    assert said(page) == ["Hello <b>you</b>", "small says"]
    assert "small" in page("document.querySelector('.why').textContent")
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    chat(page, "And now?")
    assert said(page)[2:] == ["And now?", "large says so"]
    why = page("[...document.querySelectorAll('.why')].at(-1).textContent")
    assert "escalated: low_confidence" in why and "4 of 11 positions recomputed" in why and "lifted" in why
    assert [m["content"] for m in house.small.calls[-1]["messages"]] == ["Hello <b>you</b>", "small says", "And now?"]
    until(lambda: page("document.querySelectorAll('#decisions tr').length") == 2)
    assert "low_confidence" in page("document.querySelector('#decisions tr').textContent")
    assert page("document.querySelectorAll('#tiers .card').length") == 2
    assert {url.removeprefix(house.url).split("?")[0] for url in page.requests if not url.startswith("data:")} <= {
        *OWN, "/status", "/v1/chat/completions"
    }  # fmt: skip
    assert page.complaints == []


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ({"status": 400, "error": {"error": {"message": "bad temperature", "code": 400}}}, "bad temperature"),
        ({"fault_after": 1, "fault": "error_event"}, "small\nworker 'small': HTTP 500: boom"),
        ({"fault_after": 1, "fault": "cut"}, "the answer was cut"),
    ],
)
def test_a_failed_answer_never_looks_complete(build, page, script, shown):
    house = build()
    page.open(house.url)
    until(lambda: page("document.getElementById('model').options.length") > 0)
    page("document.getElementById('model').value = 'never'")
    for key, value in script.items():
        setattr(house.small.script, key, value)
    chat(page, "Hello")
    assert shown in said(page)[-1]
    assert page("document.querySelectorAll('#messages .failed').length") == 1
    house.small.reset(type(house.small.script)(words=["fine"]))
    chat(page, "Again")
    assert [m["content"] for m in house.small.calls[0]["messages"]] == ["Again"]


def test_with_keys_the_page_asks_for_one_and_keeps_it_to_itself(build, page):
    house = build(auth=AUTH)
    page.open(house.url)
    until(lambda: not page("document.getElementById('key-form').hidden"))
    assert page("document.querySelectorAll('#tiers .card').length") == 0
    page.type("#key", KEYS["one"])
    page.press_enter()
    until(lambda: page("document.getElementById('key-form').hidden"))
    chat(page, "Hello")
    assert said(page)[-1] == "small says"
    assert KEYS["one"] not in page("document.documentElement.outerHTML + document.cookie + location.href")
    assert page("localStorage.length + sessionStorage.length") == 0
    page.open(house.url)
    until(lambda: not page("document.getElementById('key-form').hidden"))


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 820, 1280])
def test_nothing_is_wider_than_the_screen(build, page, width, dark):
    house = build(small={"served": "a-model-with-a-rather-long-name-of-its-own"})
    page.size(width, 800, dark, phone=width == 360)
    page.open(house.url)
    until(lambda: page("document.querySelectorAll('#tiers .card').length") == 2)
    chat(page, "Averylongwordwithoutanyspaceinit" * 8)
    assert page("document.documentElement.scrollWidth <= window.innerWidth")
    assert page("(box => box.scrollWidth <= box.clientWidth)(document.getElementById('messages'))")
    back = page("getComputedStyle(document.documentElement).backgroundColor")
    assert (back == "rgb(17, 21, 27)") is dark


def test_the_page_says_when_workers_are_down(build, page):
    house = build(health={"interval_s": 0.05, "misses": 1, "timeout_s": 2})
    page.open(house.url)
    house.large.script.health_status = 500
    until(
        lambda: (
            "bad"
            in page("[...document.querySelectorAll('#tiers .card')].at(-1)?.querySelector('.pill').className ?? ''")
        )
    )
    assert page("document.getElementById('state').textContent") == "not all workers are up"
    assert house.small.calls == []
