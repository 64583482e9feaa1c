"""Bad input, wrong packs and dead sources: a clear error or a visible fallback, and no slot lost."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.worker.conftest import Fleet
from tests.worker.servers import Worker, text


def post(worker: Worker, path: str, body: dict) -> httpx.Response:
    return worker.client.post(path, json=body)


def lift_body(fleet: Fleet, ids: list[int], **more) -> dict:
    return {"input_ids": ids, "source": {"url": fleet.small.url}, "pack": "tiny-small-to-large", "when": "always", **more}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"rho": -0.1}, "rho"),
        ({"rho": 1.1}, "rho"),
        ({"selector": "magic"}, "rank_disagreement, random, source_attention"),
        ({"selector": "random:x"}, "random:SEED"),
        ({"coverage": 1.5}, "coverage"),
        ({"rho": 0.3, "coverage": 0.5}, "either rho or coverage"),
        ({"when": "never"}, "when"),
        ({"bugdet": 0.3}, "bugdet"),
        ({"lease_s": 0}, "lease_s"),
        ({"input_ids": None}, "request"),
        ({"source": {}}, "source.url"),
        ({"input_ids": "abc"}, "input_ids"),
    ],
)
def test_malformed_input_is_a_400_that_names_it(fleet: Fleet, prompt, change: dict, named: str):
    reply = post(fleet.large, "/kv/lift", lift_body(fleet, prompt(20)) | change)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert named in error["message"] and error["type"] == "invalid_request_error"


def test_an_unknown_pack_is_unsupported(fleet: Fleet, prompt):
    answer = fleet.large.call("/kv/lift", **lift_body(fleet, prompt(20), pack="nobody"))
    assert answer["status"] == "unsupported" and "nobody" in answer["reason"]


def test_a_pack_for_another_source_falls_back(fleet: Fleet, prompt):
    """The block says whose it is: the large worker's KV does not go through the small one's pack."""
    ids = prompt(40)
    fleet.large.generate(ids, tokens=1)
    answer = fleet.large.lift(fleet.large, ids, "tiny-small-to-large")
    assert answer["status"] == "fallback_prefill" and "calibrate a pack for this source" in answer["reason"]


def test_another_tokenizer_falls_back(fleet: Fleet, prompt):
    """Case 59."""
    ids = prompt(40)
    fleet.smol.generate(ids, tokens=1)
    answer = fleet.large.lift(fleet.smol, ids, "tiny-small-to-large")
    assert answer["status"] == "fallback_prefill" and "made for source" in answer["reason"]


def test_a_source_without_the_prompt_falls_back(fleet: Fleet, prompt):
    answer = fleet.large.lift(fleet.small, prompt(40), "tiny-small-to-large")
    assert answer["status"] == "fallback_prefill" and "no KV of this prompt" in answer["reason"]


def test_a_prompt_over_the_context_is_unsupported(fleet: Fleet, prompt):
    answer = fleet.large.lift(fleet.small, prompt(9000), "tiny-small-to-large")
    assert answer["status"] == "unsupported" and "9000" in answer["reason"] and "8192" in answer["reason"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "gone"])
def test_a_damaged_block_falls_back(fleet: Fleet, prompt, damage: str):
    """A source that hands out damaged blocks, played by a server between the two workers."""
    from tests.worker.middleman import Middleman

    def spoil(path: Path) -> None:
        if damage == "gone":
            path.unlink()
        elif damage == "truncate":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(bytes(data))

    ids = prompt(50, seed=3)
    fleet.small.generate(ids, tokens=1)
    with Middleman(fleet.small.url, spoil) as between:
        body = lift_body(fleet, ids, source={"url": between.url})
        answer = fleet.large.call("/kv/lift", **body)
    assert answer["status"] == "fallback_prefill"
    assert {"truncate": "cannot be read", "flip": "checksums differ", "gone": "is gone"}[damage] in answer["reason"]
    assert text(fleet.large.generate(ids))


def test_a_handle_is_never_a_path(fleet: Fleet):
    reply = post(fleet.large, "/kv/release", {"handle": "../etc/passwd"})
    assert reply.status_code == 400 and "not a block handle" in reply.json()["error"]["message"]


def test_the_routes_ask_for_the_workers_key(fleet: Fleet):
    for method, path in (("GET", "/kv/capabilities"), ("GET", "/kv/counters"), ("GET", "/kv/held"), ("POST", "/kv/export"), ("POST", "/kv/lift"), ("POST", "/kv/release")):
        for headers in ({}, {"authorization": "Bearer wrong"}):
            reply = httpx.request(method, fleet.paged.url + path, headers=headers, json={})
            assert reply.status_code in (401, 403), (path, reply.status_code)
    assert fleet.paged.client.get("/kv/capabilities").status_code == 200


def test_a_source_key_is_used(fleet: Fleet, prompt):
    """Case 64: the source asks for a key; without it the lift falls back, with it it is applied."""
    ids = prompt(64, seed=4)
    fleet.paged.generate(ids, tokens=1)
    body = {"input_ids": ids, "pack": "identity", "rho": 0.0, "timeout_s": 60, "when": "always"}
    without = fleet.large.call("/kv/lift", source={"url": fleet.paged.url}, **body)
    assert without["status"] == "fallback_prefill"
    given = fleet.large.call("/kv/lift", source={"url": fleet.paged.url, "api_key": "secret"}, **body)
    assert given["status"] == "applied"


def test_capabilities_tell_who_the_worker_is(fleet: Fleet):
    small, large = (worker.client.get("/kv/capabilities").json() for worker in (fleet.small, fleet.large))
    assert small["tokenizer_digest"] == large["tokenizer_digest"] and small["template_digest"] == large["template_digest"]
    assert small["model_digest"] != large["model_digest"]
    packs = {pack["name"]: pack for pack in large["packs"]}
    assert packs["tiny-small-to-large"]["source_model_digest"] == small["model_digest"]
    assert packs["tiny-small-to-large"]["accepted"] and not packs["tiny-small-to-large"]["bench_only"]
    assert packs["noise"]["bench_only"]
    assert large["kernels"] == "torch"  # there is no Triton without a GPU
    assert large["geometry"]["kv_heads"] == small["geometry"]["kv_heads"]


def test_the_plugin_says_that_it_is_live_in_both_processes(fleet: Fleet):
    """Case 72."""
    for worker in fleet.all:
        log = worker.log.read_text()
        assert "kvlift: live in HTTP process" in log and "kvlift: live in scheduler process" in log
