"""Three tiers: where a policy sends a request, and which worker's KV goes along."""

from __future__ import annotations

import pytest

from tests.router.conftest import contents, extension
from tests.router.fake_worker import UNSURE, applied, packs, until

UNSURE_OF_IT = {"method": "avg_logprob", "threshold": -1.0}
THEOREM = {"method": "keywords", "words": ["theorem"]}
ASKED = [{"role": "user", "content": "a theorem"}]


def only(policy):
    return {"policies": {"it": policy}, "default_policy": "it"}


def calls(house):
    return len(house.small.calls), len(house.middle.calls), len(house.large.calls)


def answer(house, stream, **fields):
    """The text, the headers and the extension of an answer to the theorem."""
    if stream:
        response, lines = house.stream(messages=ASKED, **fields)
        return contents(lines), response.headers, extension(lines)
    response = house.ask(messages=ASKED, **fields)
    body = response.json()
    return body["choices"][0]["message"]["content"], response.headers, body["kvlift"]


@pytest.mark.parametrize("to", ["middle", "large"])
def test_a_rule_sends_a_request_straight_to_its_tier(build_three, stream, to):
    house = build_three(**only({**THEOREM, "to": to}))
    text, headers, told = answer(house, stream)
    assert text == "".join(getattr(house, to).script.words)
    assert told["skipped"] == [{"tier": "small", "reason": "keyword"}]
    assert (headers["x-kvlift-tier"], headers["x-kvlift-reason"]) == (to, "keyword")
    assert calls(house) == (0, int(to == "middle"), int(to == "large"))


def test_an_answer_may_be_sent_past_a_tier_with_the_kv_of_the_one_that_gave_it(build_three, stream):
    house = build_three(**only({"method": "refusal", "to": "large"}))
    house.small.script.words = ["I cannot", " help"]
    house.large.script.lift = applied()
    text, headers, _ = answer(house, stream)
    assert (text, headers["x-kvlift-reason"], headers["x-kvlift-lift"]) == ("large says so", "refusal", "applied")
    assert calls(house) == (1, 0, 1)
    assert house.large.lifts[0]["source"]["url"] == house.small.address


def test_a_rule_is_content_where_the_request_is_already_there(build_three, stream):
    """It sends nothing back, and there is nothing to note; what else judges there sends the request on."""
    house = build_three(**only({"method": "all", "of": [{**THEOREM, "to": "middle"}, UNSURE_OF_IT]}))
    house.small.script.logprob = house.middle.script.logprob = UNSURE
    text, _, told = answer(house, stream)
    assert text == "large says so" and calls(house) == (1, 1, 1)
    assert told["notes"] == []
    assert "tiers_ignored" not in house.http.get("/ready").json()["counters"]


def test_a_rule_on_the_answer_that_names_its_own_tier_asks_the_next_one(build_three, stream):
    house = build_three(**only({"method": "refusal", "to": "middle"}))
    house.small.script.words = house.middle.script.words = ["I cannot", " help"]
    text, headers, told = answer(house, stream)
    assert (text, headers["x-kvlift-reason"], told["notes"]) == ("large says so", "refusal", [])
    assert calls(house) == (1, 1, 1)


def test_a_named_tier_that_is_down_gives_way_to_the_next_one(build_three, stream):
    house = build_three(**only({**THEOREM, "to": "middle"}))
    house.middle.script.health_status = 500
    until(lambda: not house.gateway.monitor["middle"].up)
    text, _, told = answer(house, stream)
    assert text == "large says so" and calls(house) == (0, 0, 1)
    assert [skip["tier"] for skip in told["skipped"]] == ["small", "middle"]


def climb(house, stream, source):
    """Both lower tiers are unsure; the large one lifts from `source`, None: from none."""
    house.small.script.logprob = house.middle.script.logprob = UNSURE
    house.large.script.lift = applied()
    text, headers, told = answer(house, stream)
    assert text == "large says so"
    assert [lift["source"]["url"] for lift in house.large.lifts] == ([source.address] if source else [])
    assert headers["x-kvlift-lift"] == ("applied" if source else "unsupported")
    assert ("extra_key" in house.large.calls[0]) == (source is not None)
    return told


def test_lifted_kv_is_not_lifted_again(build_three, stream):
    house = build_three(**only(UNSURE_OF_IT))
    house.middle.script.lift = applied(namespace="ns-middle")
    climb(house, stream, house.small)
    assert house.middle.calls[0]["extra_key"] == "ns-middle"


def test_the_nearest_tier_that_computed_the_prompt_itself_is_the_source(build_three, stream):
    house = build_three(**only(UNSURE_OF_IT))
    house.middle.script.lift = {"status": "fallback_prefill", "reason": "busy"}
    climb(house, stream, house.middle)


def test_a_tier_without_a_pack_to_the_target_is_passed_over(build_three, stream):
    house = build_three(**only(UNSURE_OF_IT), lift={"pairs": [pair("small", "large")]})
    climb(house, stream, house.small)


def test_a_tier_that_failed_is_no_source_and_takes_none_away(build_three, stream):
    house = build_three(**only(UNSURE_OF_IT))
    house.middle.script.status = 500
    house.middle.script.lift = {"status": "fallback_prefill", "reason": "busy"}
    climb(house, stream, house.small)


def test_a_lift_to_the_middle_does_not_pass_for_one_to_the_top(build_three, stream):
    house = build_three(**only(UNSURE_OF_IT), lift={"pairs": [pair("small", "middle")]})
    house.middle.script.lift = applied()
    told = climb(house, stream, None)
    assert "no pack" in told["lift"]["reason"]


def pair(source, target):
    (pack,) = packs(f"{source}-to-{target}")
    return {"source": source, "target": target, "pack": pack["name"]}
