"""Several workers in one tier: which one is asked, and what becomes of a request when one fails."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.breaker import Breaker
from router.config import Config
from router.conversation import Conversation
from router.errors import Unavailable
from router.fleet import make_fleets, make_workers
from router.health import Monitor
from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import UNSURE, FakeWorker, Script, applied, capabilities, free_port, serving, until


@cache
def standing(count):
    """A config, and its workers, none of which is ever called."""
    config = Config.model_validate(
        {
            "tiers": [
                {
                    "name": "t",
                    "served": "s",
                    "replicas": [{"address": f"http://127.0.0.1:{n + 1}"} for n in range(count)],
                }
            ],
            "policies": {"p": {"method": "never"}},
            "default_policy": "p",
            "breaker": {"failures": 1, "interval_s": 60},
        }
    )
    return config, make_workers(config)


def fleet(count=3):
    """A tier of so many workers, all up, and the health of each."""
    config, workers = standing(count)
    monitor = Monitor(workers, config.health)
    for member in monitor.by_worker.values():
        member.up = True
        member.worker.breaker = Breaker(member.worker.name, config.breaker)
    return make_fleets(config, monitor)["t"], list(monitor.by_worker.values())


def talk(text, *more):
    return Conversation({"messages": [{"role": "user", "content": part} for part in (text, *more)]})


def test_workers_are_named_after_their_tier_and_number():
    assert [member.worker.name for member in fleet(2)[1]] == ["t#0", "t#1"]


def test_new_conversations_are_spread_over_workers_with_nothing_to_do():
    tier, members = fleet(3)
    chosen = [tier.choose(talk(str(number))) for number in range(9)]
    assert all(chosen.count(member.worker) == 3 for member in members)


def test_a_new_conversation_goes_to_the_worker_with_the_least_to_do():
    tier, members = fleet(3)
    members[0].queued, members[1].queued = 2, None
    with members[1].worker.in_flight, members[2].worker.in_flight, members[2].worker.in_flight:
        assert tier.choose(talk("a")) is members[1].worker


def test_a_conversation_goes_back_to_the_worker_that_holds_it_though_it_has_more_to_do():
    tier, _ = fleet(3)
    first = tier.choose(talk("hello"))
    with first.in_flight, first.in_flight:
        assert tier.choose(talk("hello", "and then")) is first
        assert tier.choose(talk("another")) is not first


def test_a_conversation_whose_worker_fails_moves_and_stays_where_it_moved():
    tier, _ = fleet(3)
    first = tier.choose(talk("hello"))
    first.breaker.failed()
    second = tier.choose(talk("hello", "and then"))
    first.breaker.reset()
    assert second is not first and tier.choose(talk("hello", "and then", "more")) is second


def test_another_worker_in_place_of_those_that_were_tried():
    tier, _ = fleet(3)
    tried = [tier.choose(talk("hello"))]
    while (other := tier.other(talk("hello"), tried)) is not None:
        assert other not in tried
        tried.append(other)
    assert len(tried) == 3
    assert tier.choose(talk("hello", "and then")) is tried[-1]


def test_a_worker_that_is_down_is_no_other():
    tier, members = fleet(2)
    members[1].up = False
    assert tier.other(talk("a"), [members[0].worker]) is None


STATES = st.lists(st.tuples(st.booleans(), st.booleans(), st.integers(0, 3)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(states=STATES, again=st.booleans())
def test_no_worker_that_is_down_or_broken_is_chosen_while_another_is_not(states, again):
    tier, members = fleet(len(states))
    if again:  # the conversation is held by one of them
        tier.choose(talk("hello"))
    for member, (up, broken, queued) in zip(members, states, strict=True):
        member.up, member.queued = up, queued
        if broken:
            member.worker.breaker.failed()
    usable = [m.worker for m, (up, broken, _) in zip(members, states, strict=True) if up and not broken]
    why = tier.why_not()
    assert (why is None) == bool(usable)
    assert (why == "tier_down") == (not any(up for up, _, _ in states))
    assert tier.state().healthy == bool(usable) and tier.state().queued == sum(queued for _, _, queued in states)
    if usable:
        assert tier.choose(talk("hello")) in usable
    elif all(broken for _, broken, _ in states):
        with pytest.raises(Unavailable) as caught:
            tier.choose(talk("hello"))
        assert caught.value.headers() == {"retry-after": "60"}
    else:
        assert tier.choose(talk("hello")).breaker.may_call()


def test_the_trial_of_an_open_breaker_is_one_request():
    tier, (member,) = fleet(1)
    now = [0.0]
    member.worker.breaker._clock = lambda: now[0]
    member.worker.breaker.failed()
    now[0] = 60.0
    assert tier.why_not() is None and tier.choose(talk("a")) is member.worker
    assert tier.why_not() == "breaker_open"


class Pair:
    """A house whose small tier has two workers; `small` is the first."""

    def __init__(self, stack, build, **parts):
        self.workers = [FakeWorker("served-small") for _ in range(2)]
        for worker in self.workers:
            worker.reset(Script(words=["small", " says"], capabilities=capabilities("small")))
            worker.address = stack.enter_context(serving(worker.app()))
        replicas = [{"address": worker.address, **parts.pop("replica", {})} for worker in self.workers]
        self.house = build(small={"replicas": replicas}, **parts)

    def calls(self):
        return [len(worker.calls) for worker in self.workers]


@pytest.fixture
def pair(build):
    with ExitStack() as stack:
        yield lambda **parts: Pair(stack, build, **parts)


def turns(number, count):
    """A conversation of so many turns."""
    said = {"role": "assistant", "content": "small says"}
    return [{"role": "user", "content": f"{number} 0"}] + [
        message for turn in range(1, count) for message in (said, {"role": "user", "content": f"{number} {turn}"})
    ]


def test_the_turns_of_a_conversation_are_answered_by_one_worker(pair, stream):
    two = pair()
    for turn in (1, 2, 3):
        for number in range(4):
            assert two.house.ask(messages=turns(number, turn), stream=stream).status_code == 200
    seen = [{call["messages"][0]["content"] for call in worker.calls} for worker in two.workers]
    assert not seen[0] & seen[1] and [len(texts) for texts in seen] == [2, 2]
    assert two.calls() == [6, 6]


def test_the_lift_asks_the_very_worker_that_answered(pair, stream):
    two = pair()
    two.house.large.script.lift = applied()
    for worker in two.workers:
        worker.script.logprob = UNSURE
    for number in range(6):
        two.house.ask(messages=turns(number, 1), stream=stream)
    texts = {call["messages"][0]["content"]: worker.address for worker in two.workers for call in worker.calls}
    assert len(two.house.large.lifts) == 6 and len(set(texts.values())) == 2
    for lift in two.house.large.lifts:
        assert lift["source"]["url"] == texts[lift["request"]["messages"][0]["content"]]


def test_a_worker_that_refuses_connections_costs_no_retry_and_no_escalation(pair, stream):
    two = pair(breaker={"failures": 2, "interval_s": 600}, health={"interval_s": 60})
    two.house.gateway.monitor["small#0"].worker._client.base_url = f"http://127.0.0.1:{free_port()}"
    for number in range(6):
        response = two.house.ask(messages=turns(number, 1), stream=stream)
        assert response.headers["x-kvlift-tier"] == "small"
    assert two.calls() == [0, 6]
    told = two.house.http.get("/ready").json()["tiers"]["small"]["workers"]
    assert [(worker["name"], worker["breaker"]) for worker in told] == [("small#0", "open"), ("small#1", "closed")]
    assert [worker["in_flight"] for worker in told] == [0, 0]


def test_the_record_names_the_worker(pair):
    two = pair()
    _, lines = two.house.stream()
    (attempt,) = extension(lines)["attempts"]
    assert attempt["worker"] == f"small#{two.calls().index(1)}"


def test_a_retry_goes_to_the_other_worker(pair):
    two = pair(limits={"retries": 1})
    two.workers[0].script.status = two.workers[1].script.status = 503
    assert two.house.ask().headers["x-kvlift-tier"] == "large"
    assert two.calls() == [1, 1]


def test_case_28_retries_are_counted_over_all_workers_of_the_tier(pair):
    two = pair(limits={"retries": 2, "max_calls": 9})
    for worker in two.workers:
        worker.script.status = 429
    assert two.house.ask(model="small").status_code == 429
    assert sum(two.calls()) == 3


def test_a_tier_is_up_while_any_of_its_workers_is(pair):
    two = pair()
    two.workers[0].script.health_status = 500
    until(lambda: not two.house.gateway.monitor["small#0"].up)
    assert two.house.http.get("/ready").status_code == 200
    for number in range(3):
        assert two.house.ask(messages=turns(number, 1)).headers["x-kvlift-tier"] == "small"
    assert two.calls() == [0, 3]
    two.workers[1].script.health_status = 500
    until(lambda: two.house.http.get("/ready").status_code == 503)
    assert two.house.ask().headers["x-kvlift-reason"] == "tier_down"


def test_behind_a_gateway_nothing_is_lifted_and_the_reason_is_told(build):
    house = build(small={"gateway": True}, lift={})
    house.small.script.logprob, house.large.script.lift = UNSURE, applied()
    _, lines = house.stream()
    assert contents(lines) == "large says so" and house.large.lifts == []
    lift = extension(lines)["lift"]
    assert lift["status"] == "unsupported" and "a gateway stands before" in lift["reason"]
    (worker,) = house.http.get("/ready").json()["tiers"]["small"]["workers"]
    assert "a gateway stands before" in worker["lift_error"] and worker["lifts"] is False
    assert "/kv/capabilities" not in {path for path, _ in house.small.headers}


def test_a_gateway_beside_named_workers_takes_only_its_own_lifts_away(pair):
    two = pair(replica={"gateway": True})
    assert [r.gateway for r in two.house.gateway.config.tiers[0].workers()] == [True, False]
    two.house.large.script.lift = applied()
    for worker in two.workers:
        worker.script.logprob = UNSURE
    statuses = [two.house.ask(messages=turns(n, 1)).headers["x-kvlift-lift"] for n in range(4)]
    assert sorted(statuses) == ["applied", "applied", "unsupported", "unsupported"]
    assert {lift["source"]["url"] for lift in two.house.large.lifts} == {two.workers[1].address}


def test_each_worker_has_its_own_key(pair, monkeypatch):
    monkeypatch.setenv("FIRST_KEY", "secret-0")
    two = pair(replica={"api_key_env": "FIRST_KEY"})
    for number in range(4):
        two.house.ask(messages=turns(number, 1))
    keys = [{h.get("authorization") for path, h in w.headers if path.endswith("completions")} for w in two.workers]
    assert keys == [{"Bearer secret-0"}, {None}]


def test_case_44_two_tenants_with_the_same_words_are_two_conversations():
    one, other = (Conversation({"messages": MESSAGES, "cache_salt": salt}) for salt in ("a", "b"))
    assert not set(one.digests) & set(other.digests)
