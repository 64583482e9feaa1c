"""Who answers, and what the client sees of it. Numbers are those of the case list."""

from __future__ import annotations

import json

import pytest

from tests.router.conftest import MESSAGES, contents, extension
from tests.router.fake_worker import UNSURE, FakeWorker, Script, applied, capabilities, serving, until


def plain(lines):
    """The events without the extension field."""
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    for event in events:
        event.pop("kvlift", None)
    return events


def test_a_confident_small_answer_is_kept(house):
    response, lines = house.stream()
    assert contents(lines) == "small says"
    assert lines[-1] == "[DONE]"
    kvlift = {name: value for name, value in response.headers.items() if name.startswith("x-kvlift")}
    assert kvlift == {
        "x-kvlift-tier": "small",
        "x-kvlift-escalated": "false",
        "x-kvlift-reason": "confident",
        "x-kvlift-lift": "none",
    }
    assert house.large.calls == []


@pytest.mark.parametrize("stream", [False, True])
def test_an_unsure_small_answer_is_answered_by_the_large_model_alone(house, stream):
    house.small.script.logprob = UNSURE
    if stream:
        response, lines = house.stream()
        assert contents(lines) == "large says so"
        assert "small" not in json.dumps(plain(lines))
    else:
        response = house.ask()
        assert response.json()["choices"][0]["message"]["content"] == "large says so"
    assert response.headers["x-kvlift-tier"] == "large"
    assert response.headers["x-kvlift-escalated"] == "true"
    assert response.headers["x-kvlift-reason"] == "low_confidence"


@pytest.mark.parametrize("fault", ["error_event", "cut", "bad_json", "done", "abort"])
def test_case_1_an_error_before_content_ends_in_one_clean_large_stream(house, fault):
    house.small.script.fault_after, house.small.script.fault = 0, fault
    response, lines = house.stream(model="never")
    events = plain(lines)
    assert [e["choices"][0]["delta"].get("role") for e in events].count("assistant") == 1
    assert lines.count("[DONE]") == 1
    assert contents(lines) == "large says so"
    assert response.headers["x-kvlift-escalated"] == "true"
    assert extension(lines)["attempts"][0]["outcome"] == "failed"


@pytest.mark.parametrize("fault", ["error_event", "cut", "bad_json", "done", "abort"])
@pytest.mark.parametrize("model", ["never", "large"])
def test_case_2_a_worker_that_dies_after_content_never_looks_complete(house, fault, model):
    worker = house.small if model == "never" else house.large
    worker.script.fault_after, worker.script.fault = 1, fault
    response, lines = house.stream(model=model)
    assert response.status_code == 200
    assert "error" in json.loads(lines[-1])
    assert "[DONE]" not in lines
    assert all(not c["finish_reason"] for line in lines for c in json.loads(line).get("choices", []))
    assert len(worker.calls) == 1  # case 29: no retry after content
    assert extension(lines)["attempts"][-1]["outcome"] == "failed"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        {"model": "never"},
        {"kvlift": {"policy": "never"}},
        {"model": "small"},
        {"model": "served-small"},
        {"kvlift": {"tier": "small"}},
        {"model": "always", "kvlift": {"policy": "never"}},
    ],
)
def test_case_3_never_escalate_means_no_call_to_the_large_worker(house, stream, how):
    house.small.script.logprob = UNSURE
    assert "small says" in (contents(house.stream(**how)[1]) if stream else house.ask(**how).text)
    assert house.large.calls == house.large.lifts == []


def test_case_4_a_kept_answer_passes_event_by_event(house):
    house.small.script.deltas = [
        {"reasoning_content": "hm"},
        {"content": "é 漢"},
        {"tool_calls": [{"index": 0, "id": "call_1", "function": {"name": "f", "arguments": '{"a":'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]},
        {"x_unknown": {"deep": [1]}},
    ]
    house.small.script.finish_reason = "tool_calls"
    house.small.script.logprob = None
    _, lines = house.stream(model="never")
    deltas = [event["choices"][0]["delta"] for event in plain(lines)]
    assert deltas == [{"role": "assistant", "content": ""}, *house.small.script.deltas, {}]
    assert plain(lines)[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(("logprob", "served"), [(-0.01, "served-small"), (UNSURE, "served-large")])
def test_case_5_model_is_the_answering_one_streamed_and_not(house, logprob, served):
    house.small.script.logprob = logprob
    buffered, (streamed, lines) = house.ask(), house.stream()
    assert {event["model"] for event in plain(lines)} == {buffered.json()["model"]} == {served}
    assert streamed.headers["x-kvlift-tier"] == buffered.headers["x-kvlift-tier"] == served.removeprefix("served-")


@pytest.mark.parametrize("logprob", [-0.01, UNSURE])
@pytest.mark.parametrize("asked", [True, False, None])
def test_case_7_exactly_one_usage_chunk_iff_asked(house, logprob, asked):
    house.small.script.logprob = logprob
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    _, lines = house.stream(**options)
    usages = [event for event in plain(lines) if not event["choices"]]
    assert len(usages) == (1 if asked else 0)
    if asked:
        assert plain(lines)[-1] == usages[0]
    last = json.loads(lines[-2])
    assert lines[-1] == "[DONE]" and "kvlift" in last  # the extension is in the last event either way
    extension(lines)


@pytest.mark.parametrize("stream", [False, True])
def test_case_9_usage_is_the_answering_models_and_the_discarded_tokens_are_told(house, stream):
    house.small.script.logprob = UNSURE
    if stream:
        _, lines = house.stream(stream_options={"include_usage": True})
        usage, told = json.loads(lines[-2])["usage"], extension(lines)
    else:
        body = house.ask().json()
        usage, told = body["usage"], body["kvlift"]
    assert usage["completion_tokens"] == 3
    assert [a["tokens"] for a in told["attempts"]] == [
        {"prompt": 11, "completion": 2, "cached": 5},
        {"prompt": 11, "completion": 3, "cached": 5},
    ]
    assert [a["outcome"] for a in told["attempts"]] == ["discarded", "answered"]
    assert told["attempts"][0]["confidence"] == UNSURE
    assert all(a["ms"]["total"] > 0 for a in told["attempts"])
    assert [a["ms"]["ttft"] is not None for a in told["attempts"]] == [stream, stream]


@pytest.mark.parametrize("logprob", [-0.01, UNSURE])
def test_case_13_as_many_log_probabilities_as_tokens_reasoning_included(house, logprob):
    house.small.script.logprob = logprob
    house.small.script.deltas = [{"reasoning_content": "hm"}, {"content": "x"}]
    house.large.script.deltas = [{"reasoning_content": "h"}, {"reasoning_content": "m"}, {"content": "y"}]
    _, lines = house.stream(logprobs=True, stream_options={"include_usage": True})
    entries = [e for event in plain(lines) for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])]
    assert len(entries) == json.loads(lines[-2])["usage"]["completion_tokens"] == (2 if logprob > UNSURE else 3)


@pytest.mark.parametrize("logprob", [-0.01, UNSURE])
@pytest.mark.parametrize("words_per_event", [1, 2, 3])
def test_case_14_each_token_has_its_own_alternatives_streamed_as_buffered(house, logprob, words_per_event):
    house.small.script.logprob = logprob
    for worker in (house.small, house.large):
        worker.script.words_per_event = words_per_event
    asked = {"model": "gap", "logprobs": True, "top_logprobs": 2}
    _, lines = house.stream(**asked)
    streamed = [e for event in plain(lines) for c in event["choices"] for e in (c["logprobs"] or {}).get("content", [])]
    buffered = house.ask(**asked).json()["choices"][0]["logprobs"]["content"]
    assert streamed == buffered and all(len(entry["top_logprobs"]) == 2 for entry in streamed)


@pytest.mark.parametrize("escalation", ["restart", "continue"])
def test_case_16_an_escalated_tool_call_is_the_large_models_alone(house, stream, escalation):
    def pieces(name, *arguments):
        head = {"index": 0, "id": f"call_{name}", "type": "function", "function": {"name": "f", "arguments": ""}}
        return [head, *({"index": 0, "function": {"arguments": part}} for part in arguments)]

    whole = {"id": "call_large", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    large = [{"tool_calls": [piece]} for piece in pieces("large", '{"a"', ": 1}")]
    house.small.script.deltas = [{"tool_calls": [piece]} for piece in pieces("small", '{"zq": ')]
    house.large.script.deltas = large if stream else [{"tool_calls": [whole]}]
    house.small.script.words = house.large.script.words = []
    house.small.script.finish_reason = house.large.script.finish_reason = "tool_calls"
    options = {"kvlift": {"escalation": escalation}}
    asked = {"model": "always", "tools": [{"type": "function", "function": {"name": "f"}}], **options}
    if stream:
        _, lines = house.stream(**asked)
        choices = [choice for event in plain(lines) for choice in event["choices"]]
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", [])]
        text = json.dumps(plain(lines))
    else:
        body = house.ask(**asked).json()
        choices, text = body["choices"], json.dumps({**body, "kvlift": None})
        calls = choices[0]["message"]["tool_calls"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert [call["id"] for call in calls if "id" in call] == ["call_large"]
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"a": 1}
    assert "zq" not in text and "call_small" not in text


def test_case_17_the_large_worker_gets_the_clients_body(house):
    house.small.script.logprob = UNSURE
    asked = {
        "temperature": 0,
        "seed": 7,
        "stop": ["x"],
        "x_future": 1,
        "cache_salt": "tenant",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"required": ["zq"]}}},
    }
    house.ask(**asked)
    assert house.large.calls[0] == {"model": "served-large", "messages": MESSAGES, **asked}
    house.stream(**asked)
    assert house.large.calls[1] == {**house.large.calls[0], "stream": True, "stream_options": {"include_usage": True}}


def test_case_18_unknown_fields_are_forwarded_to_both_workers(house):
    house.small.script.logprob = UNSURE
    house.ask(x_future=1)
    assert house.small.calls[0]["x_future"] == house.large.calls[0]["x_future"] == 1


def test_case_19_n_above_one_is_refused_with_the_reason_or_forwarded_to_a_pinned_tier(house):
    refused = house.ask(n=3)
    assert refused.status_code == 400
    assert "n must be 1" in refused.json()["error"]["message"] and house.small.calls == []
    assert len(house.ask(n=3, model="small").json()["choices"]) == 3


def test_case_60_only_output_logprobs_are_asked_for(house):
    house.ask(x=1)
    assert house.small.calls[0] == {"model": "served-small", "messages": MESSAGES, "x": 1, "logprobs": True}
    house.ask(model="never")
    assert "logprobs" not in house.small.calls[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [None, 0, 1, 3])
def test_the_client_sees_the_log_probabilities_that_it_asked_for(house, stream, asked):
    fields = {} if asked is None else {"logprobs": True, "top_logprobs": asked}
    if stream:
        _, lines = house.stream(model="gap", **fields)
        shown = [c["logprobs"] for event in plain(lines) for c in event["choices"] if c["delta"].get("content")]
    else:
        shown = [house.ask(model="gap", **fields).json()["choices"][0]["logprobs"]]
    assert house.small.calls[0]["top_logprobs"] == max(2, asked or 0)
    if asked is None:
        assert shown == [None] * len(shown)
    else:
        entries = [entry for logprobs in shown for entry in logprobs["content"]]
        assert [len(entry["top_logprobs"]) for entry in entries] == [asked, asked]


@pytest.mark.parametrize("words_per_event", [1, 2])
def test_the_decision_does_not_depend_on_how_tokens_are_chunked(house, words_per_event):
    house.small.script.words_per_event = words_per_event
    _, lines = house.stream()
    assert extension(lines)["attempts"][0]["confidence"] == house.ask().json()["kvlift"]["attempts"][0]["confidence"]


def test_missing_log_probabilities_escalate_and_say_so(house):
    house.small.script.logprob = None
    assert house.ask().headers["x-kvlift-reason"] == "no_logprobs"


def test_an_empty_answer_escalates_and_says_so(house):
    house.small.script.words = []
    assert house.stream()[0].headers["x-kvlift-reason"] == "empty_answer"
    assert house.ask().headers["x-kvlift-reason"] == "empty_answer"


def test_an_early_decision_aborts_the_small_worker(house):
    house.small.script.logprob = UNSURE
    house.small.script.words = ["w"] * 3
    house.small.script.fault_after, house.small.script.fault = 2, "stall"
    _, lines = house.stream(model="worst")
    assert contents(lines) == "large says so"
    assert extension(lines)["attempts"][0]["tokens"] == {"prompt": None, "completion": 1, "cached": None}
    until(lambda: house.small.aborted == 1 and house.small.running == 0)


def test_three_tiers_are_climbed_in_order_and_each_lift_asks_the_one_below(build):
    middle = FakeWorker("served-middle")
    middle.reset(Script(logprob=UNSURE, capabilities=capabilities("middle")))
    with serving(middle.app()) as address:
        pairs = [{"source": "middle", "target": "large", "pack": "middle-to-large"}]
        house = build(middle={"name": "middle", "served": "served-middle", "address": address}, lift={"pairs": pairs})
        house.small.script.logprob = UNSURE
        pack = {**capabilities("large")["packs"][0], "name": "middle-to-large", "source_model_digest": "d-middle"}
        house.large.script.capabilities = capabilities("large", packs=[pack])
        house.gateway.monitor["large"].capabilities = None  # learned anew at the next probe
        until(lambda: house.gateway.monitor["large"].capabilities is not None)
        house.large.script.lift = applied()
        told = house.ask().json()["kvlift"]
        assert [(a["tier"], a["outcome"]) for a in told["attempts"]] == [
            ("small", "discarded"), ("middle", "discarded"), ("large", "answered"),
        ]  # fmt: skip
        assert told["lift"]["status"] == "applied"
        assert house.large.lifts[0]["source"]["url"] == address


def test_the_discarded_text_is_shown_only_when_asked_for(house):
    house.small.script.logprob = UNSURE
    assert house.ask(kvlift={"debug": True}).json()["kvlift"]["attempts"][0]["text"] == "small says"
    assert "text" not in house.ask().json()["kvlift"]["attempts"][0]


def test_the_kvlift_key_is_never_forwarded(house):
    house.ask(kvlift={"debug": True})
    assert "kvlift" not in house.small.calls[0]


@pytest.mark.parametrize("wrong", [{"polcy": "x"}, {"rho": 2}, {"lift": "maybe"}, "x"])
def test_wrong_overrides_are_refused_by_name(house, wrong):
    response = house.ask(kvlift=wrong)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("kvlift")
    assert house.small.calls == []


@pytest.mark.parametrize("override", [{"policy": "sure"}, {"rho": 0.5}, {"lift": "require"}])
def test_overrides_that_contradict_a_pinned_tier_are_refused(house, override):
    assert house.ask(model="small", kvlift=override).status_code == 400


def test_a_missing_done_after_the_finish_is_no_error(house):
    house.small.script.send_done = False
    _, lines = house.stream()
    assert lines[-1] == "[DONE]" and contents(lines) == "small says"


def test_a_lifted_answer_carries_no_namespace(house):
    house.small.script.logprob = UNSURE
    house.large.script.lift = applied()
    assert "ns-1" not in house.ask().text
    assert house.large.calls[0]["extra_key"] == "ns-1"
