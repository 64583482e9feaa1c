"""Laws of compiling and linking on real SGLang workers, fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Sequence

import pytest

from sglang_ext.documents.link import link as link_spans
from sglang_ext.offline.executor import TransformersExecutor
from tests.mooncake import HAS_MOONCAKE
from tests.worker.conftest import Fleet
from tests.worker.documents import add, compiled, flat, link, names
from tests.worker.servers import cached, first_logprobs, text
from tests.worker.test_lift import TOLERANCE, close


@pytest.fixture
def documents(fleet: Fleet, prompt) -> dict[str, list[int]]:
    """Three documents, by the ids that the large worker gave them."""
    made = [prompt(length, seed=900 + length) for length in (40, 25, 33)]
    return {add(fleet.large, ids): ids for ids in made}


def layouts(documents: dict[str, list[int]], prompt) -> list[list[Sequence[int] | str]]:
    """Spans in many orders: inline between documents and not, repeated, first and last."""
    a, b, c = documents
    p, s, q = prompt(20, seed=91), prompt(7, seed=92), prompt(11, seed=93)
    return [
        [p, a, s, b, s, c, q], [p, c, b, a, q], [a, q], [a, b, c, q], [p, b, q, b, s, b, q], [p, a, s, c], [a, b],
        [p, [], a, [], s],
    ]  # fmt: skip


def lossless(ours: dict, native: dict) -> bool:
    return close(first_logprobs(ours), first_logprobs(native)) and text(ours) == text(native)


def test_a_document_behind_the_prefix_with_which_it_was_compiled_is_native(fleet: Fleet, prompt, documents):
    """It was compiled behind nothing, and stands there."""
    [a, *_], question = documents, prompt(9, seed=94)
    linked = link(fleet.large, [a, question], documents)
    assert linked["status"] == "applied", linked
    assert linked["tokens"] == {"prompt": 49, "cached": 0, "linked": 40, "computed": 9, "missed": 0}
    ids = flat([a, question], documents)
    ours, native = fleet.large.generate(ids, extra_key=linked["namespace"]), fleet.large.generate(ids)
    assert cached(ours) == len(ids) - 1 and cached(native) == 0
    assert lossless(ours, native)


def test_with_all_tokens_recomputed_every_layout_is_native(fleet: Fleet, prompt, documents):
    for spans in layouts(documents, prompt):
        ids = flat(spans, documents)
        linked = link(fleet.large, spans, documents, recompute=1000)
        assert linked["tokens"]["computed"] == len(ids) - linked["tokens"]["cached"]
        assert lossless(fleet.large.generate(ids, extra_key=linked["namespace"]), fleet.large.generate(ids))
        fleet.large.flush()


@pytest.mark.parametrize(("name", "recompute"), [("large", 0), ("large", 3), ("smol", 0)])
def test_linking_is_the_transformers_executors(
    fleet: Fleet, reference: dict[str, TransformersExecutor], prompt, documents, name: str, recompute: int
):
    worker, executor = getattr(fleet, name), reference[name]
    if worker is not fleet.large:
        documents = {add(worker, ids): ids for ids in documents.values()}
    blocks = compiled(executor, documents)
    several = layouts(documents, prompt)
    for spans in several if name == "large" else several[:3]:
        linked = link(worker, spans, documents, recompute=recompute)
        plan = link_spans([blocks[span] if isinstance(span, str) else span for span in spans])
        leading = [position for one in plan.placed for position in one.own[:recompute]]
        plan = plan.computing(_sorted(leading))
        assert linked["starts"] == [one.start for one in plan.placed]
        # The last position is computed by SGLang, also where it is a document's.
        assert linked["tokens"]["linked"] == len(plan.plan.filled)
        row = executor.row(len(plan))
        for one in plan.placed:
            executor.fill_block(row, one.document.block, one.start)
        [logits] = executor.run([row], [plan.tokens.tolist()], [plan.plan])
        ours = first_logprobs(worker.generate(flat(spans, documents), extra_key=linked["namespace"]))
        expected = logits.log_softmax(-1)
        assert all(abs(expected[token] - logprob) < TOLERANCE for token, logprob in ours.items())
        worker.flush()


def test_every_token_is_cached_linked_or_computed(fleet: Fleet, prompt, documents):
    for spans in layouts(documents, prompt):
        for worker in (fleet.large, fleet.paged):
            for recompute in (0, 5):
                tokens = link(worker, spans, documents, recompute=recompute)["tokens"]
                assert tokens["cached"] + tokens["linked"] + tokens["computed"] == tokens["prompt"]
                assert tokens["prompt"] == len(flat(spans, documents)) and tokens["missed"] == 0


def test_linked_kv_is_never_seen_without_its_namespace_nor_by_another_salt(fleet: Fleet, prompt, documents):
    """Cases 44 and 46."""
    spans = layouts(documents, prompt)[0]
    ids = flat(spans, documents)
    link(fleet.large, spans, documents)
    assert cached(fleet.large.generate(ids)) == 0
    salted = {add(fleet.large, own, cache_salt="a"): own for own in documents.values()}
    assert not salted.keys() & documents.keys()
    other = [spans[0], *(span for span in spans[1:])]
    other = [list(salted)[list(documents).index(span)] if isinstance(span, str) else span for span in other]
    again = link(fleet.large, other, salted, cache_salt="a")
    assert again["tokens"]["cached"] == 0
    reply = fleet.large.client.post("/kv/link", json={"input_ids": ids, "documents": names(other), "cache_salt": "b"})
    assert reply.status_code == 404 and "no document" in reply.json()["error"]["message"]


def test_the_same_ids_with_other_documents_in_them_share_what_stands_before_these(fleet: Fleet, prompt, documents):
    a, b, _ = documents
    p, s, q = prompt(20, seed=91), prompt(7, seed=92), prompt(11, seed=93)
    link(fleet.large, [p, a, s, b, q], documents)
    fewer = fleet.large.call("/kv/link", input_ids=flat([p, a, s, b, q], documents), documents=[a])
    assert fewer["tokens"]["cached"] == 0, "b is inline here: its entries and those behind it are others"
    more = link(fleet.large, [p, a, s, b, q, a, q], documents)
    # The last position of what was linked first was never computed.
    assert more["tokens"]["cached"] == len(flat([p, a, s, b, q], documents)) - 1


def test_native_kv_of_the_prompt_is_exact_and_costs_a_copy(fleet: Fleet, prompt, documents):
    spans = layouts(documents, prompt)[0]
    ids = flat(spans, documents)
    native = fleet.large.generate(ids)
    linked = link(fleet.large, spans, documents)
    assert linked["tokens"] == {"prompt": len(ids), "cached": len(ids) - 1, "linked": 0, "computed": 1, "missed": 0}
    assert lossless(fleet.large.generate(ids, extra_key=linked["namespace"]), native)


def test_a_document_that_is_no_slice_of_the_prompt_is_a_counted_miss(fleet: Fleet, prompt, documents):
    """Case 53."""
    a, b, _ = documents
    spans = [prompt(20, seed=91), a, documents[b][1:], prompt(11, seed=93)]
    ids = flat(spans, documents)
    before = fleet.large.counters()
    linked = fleet.large.call("/kv/link", input_ids=ids, documents=[a, b])
    assert linked["status"] == "applied"
    assert linked["starts"] == [20, None]
    assert linked["tokens"] == {"prompt": 95, "cached": 0, "linked": 40, "computed": 55, "missed": 25}
    nothing = fleet.large.call("/kv/link", input_ids=ids, documents=[b])
    assert nothing["status"] == "fallback_prefill" and "slice" in nothing["reason"]
    assert nothing["tokens"]["missed"] == 25 and nothing["tokens"]["computed"] == 95
    after = fleet.large.counters()
    assert after["prompts_linked"] - before["prompts_linked"] == 1


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_pages_are_whole(fleet: Fleet, prompt, length: int):
    """Case 48: pages of 16, documents and prompts around a page. The document is first, so that linking is exact."""
    ids, rest = prompt(length, seed=950), prompt(5, seed=951)
    documents = {add(fleet.paged, ids): ids}
    linked = link(fleet.paged, [*documents, rest], documents)
    whole = ids + rest
    pages = (len(whole) - 1) // 16 * 16
    if not pages:
        assert linked["status"] == "fallback_prefill" and "page" in linked["reason"]
        return
    ours = fleet.paged.generate(whole, extra_key=linked["namespace"])
    assert cached(ours) == pages
    assert text(ours) == text(fleet.large.generate(whole))


def test_a_worker_finds_what_another_one_stored(fleet: Fleet, prompt):
    """Large and paged serve the same model and share a folder."""
    ids = prompt(50, seed=960)
    document = add(fleet.large, ids)
    before = fleet.paged.counters()["compiled_positions"]
    linked = fleet.paged.call("/kv/link", input_ids=ids + [400, 401], documents=[document])
    assert linked["status"] == "applied" and linked["from"] == ["storage"]
    assert fleet.paged.counters()["compiled_positions"] == before


@pytest.mark.skipif(not HAS_MOONCAKE, reason="Mooncake is not installed")
def test_what_memory_let_go_of_comes_from_the_mooncake_store(fleet: Fleet, prompt):
    before = fleet.small.counters()
    corpus = {add(fleet.small, ids): ids for ids in (prompt(200, seed=1200 + number) for number in range(12))}
    origins = []
    for name in corpus:
        linked = link(fleet.small, [[300], name, [500, 501]], corpus)
        assert linked["status"] == "applied" and linked["tokens"]["missed"] == 0
        origins += linked["from"]
    assert "storage" in origins and "compiled" not in origins
    deleted = next(iter(corpus))
    assert fleet.small.client.delete(f"/v1/documents/{deleted}").status_code == 200
    assert fleet.small.client.get(f"/v1/documents/{deleted}").status_code == 404
    after = fleet.small.counters()
    assert after["documents_storage_failed"] == before["documents_storage_failed"]
    assert after["documents_broken"] == before["documents_broken"]


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "another", "gone"])
def test_a_stored_document_that_is_broken_is_compiled_again(fleet: Fleet, prompt, tmp_path: Path, damage: str):
    ids = prompt(50, seed=970 + sum(map(ord, damage)))
    document = add(fleet.large, ids)
    [path] = [one for one in fleet.documents.glob(f"{document}.*") if ".record" not in one.name]
    whole = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(whole[:-9])
    elif damage == "flip":
        whole[-9] ^= 1
        path.write_bytes(whole)
    elif damage == "another":
        other = add(fleet.large, ids[1:])
        [theirs] = [one for one in fleet.documents.glob(f"{other}.*") if ".record" not in one.name]
        path.write_bytes(theirs.read_bytes())
    else:
        exported = fleet.small.generate(ids) and fleet.small.call("/kv/export", input_ids=ids)
        block = (Path("/dev/shm") / exported["handle"]).read_bytes()
        fleet.small.call("/kv/release", handle=exported["handle"])
        path.write_bytes(len(block).to_bytes(8, "big") + block)
    before = fleet.paged.counters()
    linked = fleet.paged.call("/kv/link", input_ids=ids + [400, 401], documents=[document])
    assert linked["status"] == "applied" and linked["from"] == ["compiled"]
    after = fleet.paged.counters()
    assert after["documents_broken"] - before["documents_broken"] == (damage in ("flip", "foreign", "another"))
    again = fleet.paged.call("/kv/link", input_ids=ids + [402, 403], documents=[document])
    assert again["status"] == "applied" and again["from"] != ["compiled"]


def test_novel_shuffles_of_a_fixed_corpus_keep_their_hit_rate(fleet: Fleet, prompt):
    """Case 54. The worker's memory holds a few documents of the corpus, its folder all of them."""
    rng = random.Random(0)
    corpus = {add(fleet.paged, ids): ids for ids in (prompt(30, seed=980 + number) for number in range(10))}
    rates, hits, asked = [], 0, 0
    origins: set[str] = set()
    for number in range(200):
        chosen = rng.sample(sorted(corpus), 4)
        spans: list[Sequence[int] | str] = [[300 + number], *chosen, [500, 501]]
        linked = link(fleet.paged, spans, corpus)
        assert linked["status"] == "applied" and linked["tokens"]["missed"] == 0
        hits += sum(origin != "compiled" for origin in linked["from"])
        asked += len(chosen)
        origins |= set(linked["from"])
        rates.append(hits / asked)
    assert min(rates[19:]) >= rates[19] and rates[-1] > 0.9
    assert origins == {"memory", "storage"}, "the memory must be too small for the corpus"
    stored = [path for path in fleet.documents.glob("*.bin") if path.name.split(".")[0] in corpus]
    assert len(stored) == 2 * len(corpus), "a record and a block of each, however often it is linked"


def test_a_list_of_documents_follows_what_is_added_and_deleted(fleet: Fleet, prompt):
    client = fleet.small.client
    where = {"cache_salt": "list"}
    made = [add(fleet.small, prompt(20, seed=990 + number), **where) for number in range(3)]
    again = fleet.small.call("/v1/documents", ids=prompt(20, seed=990), ttl=500.0, **where)
    assert again["id"] == made[0] and again["expires"] - again["created"] > 400
    listed = client.get("/v1/documents", params=where).json()
    assert listed["object"] == "list" and [one["id"] for one in listed["data"]] == made
    shown = client.get(f"/v1/documents/{made[1]}", params=where).json()
    assert shown["tokens"] == 20 and shown["method"] == "plain" and shown["text"]
    assert client.delete(f"/v1/documents/{made[1]}", params=where).json()["deleted"]
    assert client.get(f"/v1/documents/{made[1]}", params=where).status_code == 404
    assert client.delete(f"/v1/documents/{made[1]}", params=where).status_code == 404
    assert [one["id"] for one in client.get("/v1/documents", params=where).json()["data"]] == [made[0], made[2]]
    assert client.get("/v1/documents", params={"cache_salt": "nobody"}).json()["data"] == []


def _sorted(positions: list[int]):
    import torch

    return torch.tensor(sorted(positions), dtype=torch.int64)
