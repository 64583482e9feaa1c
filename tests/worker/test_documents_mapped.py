"""Documents that one model compiled and another reads: mapped through a pack, repaired where they are linked."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.document import Document
from sglang_ext.documents.link import link as link_spans
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.phases import Phases
from sglang_ext.plan import budget_size
from sglang_ext.transfer.pack import Pack
from sglang_ext.transfer.selectors import Fraction, scorer_named, top_positions
from tests.worker.conftest import PACK, Fleet
from tests.worker.documents import add, ask, by_id, chat, flat, item, link, said, texts
from tests.worker.servers import Worker, first_logprobs, text
from tests.worker.test_lift import TOLERANCE, close


def mapped(worker: Worker, source: Worker, ids: list[int], pack: str) -> str:
    where = {"url": source.url, "api_key": source.api_key}
    return worker.call("/kv/map", ids=ids, source=where, pack=pack)["id"]


def test_through_the_identity_a_document_is_what_the_model_itself_compiles(fleet: Fleet, prompt):
    ids, first, question = prompt(40, seed=601), prompt(20, seed=602), prompt(9, seed=603)
    whole = first + ids + question
    answers = []
    for document in (add(fleet.paged, ids), mapped(fleet.paged, fleet.large, ids, "identity")):
        linked = link(fleet.paged, [first, document, question], {document: ids}, rho=0.0)
        assert linked["tokens"]["linked"] == 40
        answers.append(fleet.paged.generate(whole, extra_key=linked["namespace"]))
        fleet.paged.flush()
    own, other = answers
    assert close(first_logprobs(own), first_logprobs(other)) and text(own) == text(other)


@pytest.mark.parametrize("pack", ["noise", PACK.name])
def test_at_the_full_budget_the_map_does_not_matter(fleet: Fleet, prompt, pack: str):
    ids, first, question = prompt(40, seed=611), prompt(20, seed=612), prompt(9, seed=613)
    document = mapped(fleet.large, fleet.small, ids, pack)
    linked = link(fleet.large, [first, document, question], {document: ids}, rho=1.0)
    assert linked["tokens"]["linked"] == 0 and linked["tokens"]["computed"] == 69
    ours = fleet.large.generate(first + ids + question, extra_key=linked["namespace"])
    native = fleet.large.generate(first + ids + question)
    assert close(first_logprobs(ours), first_logprobs(native)) and text(ours) == text(native)


@pytest.mark.parametrize("rho", [0.0, 0.3])
def test_map_and_repair_are_those_of_the_library(
    fleet: Fleet, reference: dict[str, TransformersExecutor], prompt, rho: float
):
    made = [prompt(40, seed=621), prompt(25, seed=622)]
    documents = {mapped(fleet.large, fleet.small, ids, PACK.name): ids for ids in made}
    [a, b], first, question = documents, prompt(20, seed=623), prompt(9, seed=624)
    spans = [first, b, question, a, question]
    linked = link(fleet.large, spans, documents, rho=rho)
    small, large, maps = reference["small"], reference["large"], Pack.load(PACK).maps
    blocks, scores = {}, {}
    for name, document in zip(documents, Compiler(small).compile(made), strict=True):
        layers = list(maps.predict(document.block, Phases()))
        shape = (len(document), large.geometry.kv_heads, large.geometry.head_dim)
        keys, values = (torch.stack([layer[side].view(shape) for layer in layers]) for side in (1, 2))
        blocks[name] = Document(KVBlock(document.block.tokens, keys, values, large.geometry, large.identity))
        scores[name] = scorer_named("rank_disagreement")(document.block, torch.stack([layer[3] for layer in layers]))
    plan = link_spans([blocks[span] if isinstance(span, str) else span for span in spans])
    repaired = [
        one.start + top_positions(scores[name], Fraction(rho)) for name, one in zip((b, a), plan.placed, strict=True)
    ]
    plan = plan.computing(torch.cat(repaired))
    budget = sum(budget_size(rho, len(ids) + 1) - 1 for ids in made)
    assert linked["tokens"]["linked"] == len(plan.plan.filled) == 65 - budget
    row = large.row(len(plan))
    for one in plan.placed:
        large.fill_block(row, one.document.block, one.start)
    [logits] = large.run([row], [plan.tokens.tolist()], [plan.plan])
    ours = first_logprobs(fleet.large.generate(flat(spans, documents), extra_key=linked["namespace"]))
    expected = logits.log_softmax(-1)
    assert all(abs(expected[token] - logprob) < TOLERANCE for token, logprob in ours.items())


def test_a_chat_takes_mapped_documents_in_any_order(fleet: Fleet):
    one = item(3)
    where = {"source": {"url": fleet.small.url}, "pack": PACK.name}
    ids = [fleet.large.call("/kv/map", text=part, **where)["id"] for part in texts(one)]
    for order in (ids, ids[::-1]):
        answer = ask(fleet.large, chat(one, [by_id(document) for document in order], documents={"rho": 0.3}))
        told = answer["documents"]
        assert told["status"] == "applied" and said(answer)
        tokens = sum(part["tokens"] for part in told["documents"])
        assert 0.5 * tokens < told["tokens"]["linked"] < tokens
        assert {part["from"] for part in told["documents"]} == {"memory"}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({}, "source"),
        ({"source": {"url": "http://127.0.0.1:9"}, "method": "plain"}, "method"),
        ({"source": {"url": "http://127.0.0.1:9"}, "pack": "nobody"}, "nobody"),
        ({"source": {"url": "http://127.0.0.1:9"}, "pack": PACK.name}, "did not export"),
        ({"source": {"url": "LARGE"}, "pack": PACK.name}, "calibrate a pack for this source"),
    ],
)
def test_what_cannot_be_mapped_is_a_400_that_says_why(fleet: Fleet, prompt, more: dict, named: str):
    if more.get("source") == {"url": "LARGE"}:
        more = {**more, "source": {"url": fleet.large.url}}
    reply = fleet.large.client.post("/kv/map", json={"ids": prompt(20, seed=631), **more})
    assert reply.status_code == 400 and named in reply.json()["error"]["message"]


def test_the_public_route_takes_no_address(fleet: Fleet, prompt):
    body = {"ids": prompt(20, seed=632), "source": {"url": fleet.small.url}}
    for more in ({}, {"method": "mapped"}):
        assert fleet.large.client.post("/v1/documents", json={**body, **more}).status_code == 400
