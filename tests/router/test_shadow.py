"""Shadow calls: off the path, bounded, counted; the client sees nothing of them."""

from __future__ import annotations

import asyncio
import json

import pytest

from policies import Finish, ToolCall
from router.chat import ChatRequest
from router.gateway import Gateway
from router.shadow import agree
from tests.router.conftest import MESSAGES, contents
from tests.router.fake_worker import UNSURE, until
from tests.router.test_disconnect import hang_up


def shadowed(build, share=1.0, **parts):
    sure = {"method": "avg_logprob", "threshold": -1.0}
    policies = {"it": {"method": "shadow", "share": share, "of": sure}}
    return build(policies=policies, default_policy="it", **parts)


def counts(house):
    """What was counted, without zeros."""
    told = house.http.get("/ready").json()["counters"]["shadow"]
    return {outcome: count for outcome, count in told.items() if count}


def stall(worker):
    worker.script.fault_after, worker.script.fault = 1, "stall"


@pytest.mark.parametrize(
    ("words", "outcome"),
    [(["small", "\n  says "], "agreed"), (["small", "says"], "disagreed"), (["Small", " says"], "disagreed")],
)
def test_the_next_tier_is_asked_the_same_and_agreement_is_counted(build, stream, words, outcome):
    house = shadowed(build)
    house.large.script.words = words
    house.ask(stream=stream, temperature=0, cache_salt="tenant")
    until(lambda: counts(house) == {outcome: 1})
    (kept,), (asked,) = house.small.calls, house.large.calls
    assert asked == {**{k: v for k, v in kept.items() if k != "logprobs"}, "model": "served-large"}
    assert house.large.lifts == []


def test_the_answer_is_complete_while_the_shadow_call_runs(build, stream):
    house = shadowed(build)
    stall(house.large)
    response = house.ask(stream=stream)
    assert "says" in response.text
    until(lambda: house.large.running == 1)
    assert house.gateway.idle and counts(house) == {}


def test_the_answer_is_the_same_with_and_without(build, stream):
    seen = []
    for share in (0.0, 1.0):
        house = shadowed(build, share)
        response = house.ask(stream=stream)
        lines = response.text.split("\n")
        parsed = [json.loads(part) for line in lines if "{" in (part := line.removeprefix("data: "))]
        for event in parsed:
            for attempt in event.get("kvlift", {}).get("attempts", []):
                del attempt["ms"]
        headers = {name: value for name, value in response.headers.items() if name.startswith("x-kvlift")}
        seen.append((parsed, headers))
        until(lambda h=house, s=share: len(h.large.calls) == s)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("fault", ["status", "cut", "stall"])
def test_a_shadow_call_that_fails_or_takes_too_long_is_counted(build, stream, fault):
    house = shadowed(build, limits={"attempt_s": 0.5})
    if fault == "status":
        house.large.script.status = 500
    elif fault == "cut":
        house.large.script.fault_after, house.large.script.fault = 1, "cut"
        stream = True
    else:
        stall(house.large)
    assert house.ask(stream=stream).status_code == 200
    until(lambda: counts(house) == {"failed": 1})
    until(lambda: house.large.running == 0)


def test_no_more_run_at_once_than_the_limit_allows(build, stream):
    house = shadowed(build, limits={"max_shadow": 2})
    stall(house.large)
    for _ in range(5):
        house.ask(stream=stream)
    until(lambda: counts(house) == {"dropped": 3})
    until(lambda: house.large.running == 2)


def test_a_tier_that_is_down_is_not_asked(build):
    house = shadowed(build)
    house.large.script.health_status = 500
    until(lambda: not house.gateway.monitor["large"].up)
    house.ask()
    until(lambda: counts(house) == {"dropped": 1})
    assert house.large.calls == []


def test_only_whole_kept_answers_have_a_shadow(build):
    house = shadowed(build)
    house.small.script.logprob = UNSURE
    house.ask()  # escalated
    assert len(house.large.calls) == 1
    house.small.script.logprob = -0.01
    house.ask(model="small")  # pinned
    assert len(house.large.calls) == 1 and counts(house) == {}


def test_an_answer_that_is_cut_or_not_waited_for_has_no_shadow(build):
    policies = {"it": {"method": "shadow", "share": 1.0, "of": {"method": "never"}}}
    house = build(policies=policies, default_policy="it")
    house.small.script.fault_after, house.small.script.fault = 1, "cut"
    _, lines = house.stream()
    assert contents(lines) == "small" and "error" in lines[-1]
    stall(house.small)
    hang_up(house, lambda: house.small.running == 1, stream=True)
    until(lambda: house.gateway.idle)
    assert house.large.calls == [] and counts(house) == {}


def test_the_end_of_the_router_cancels_what_runs(build):
    house = shadowed(build)
    stall(house.large)
    sent = []

    async def run():
        async with Gateway(house.gateway.config) as gateway:
            raw = json.dumps({"model": "kvlift", "messages": MESSAGES}).encode()
            reply = gateway.reply(ChatRequest, raw, gateway.admit({}), {})
            await reply(
                {"type": "http", "method": "POST", "path": ChatRequest.path, "headers": []},
                asyncio.Event().wait,
                _into(sent),
            )
            while not house.large.running:
                await asyncio.sleep(0.01)
        return gateway.counters.shadow["cancelled"]

    assert asyncio.run(asyncio.wait_for(run(), 10)) == 1
    assert b"small says" in b"".join(message.get("body", b"") for message in sent)
    until(lambda: house.large.running == 0 and house.large.aborted == 1)


def _into(sent):
    async def send(message):
        sent.append(message)

    return send


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (Finish("stop", "a b"), Finish("length", " a\n b "), True),
        (Finish("stop", "ab"), Finish("stop", "a b"), False),
        (Finish("stop", "", (ToolCall("f", '{"a": 1}'),)), Finish("stop", "", (ToolCall("f", '{"a":  1}'),)), True),
        (Finish("stop", "", (ToolCall("f", "{}"),)), Finish("stop", "", (ToolCall("g", "{}"),)), False),
        (Finish("stop", "", ()), Finish("stop", "", (ToolCall("f", "{}"),)), False),
    ],
)
def test_agreement_is_the_same_text_and_calls_but_for_white_space(one, other, same):
    assert agree(one, other) is same and agree(other, one) is same
