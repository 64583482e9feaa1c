"""Laws of linking and compiling on models, in float32 (SemPIC, section 2 and appendix C)."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from transformers import DynamicCache

from sglang_ext.block import KVBlock
from sglang_ext.documents.compilers import Compiler, Envelope, Method
from sglang_ext.documents.document import SOFT, Document
from sglang_ext.documents.link import link
from sglang_ext.errors import BlockError, DocumentError
from sglang_ext.offline.documents.cache import LinkedCache
from tests.documents.builders import run
from tests.kv.builders import one_thread, random  # noqa: F401
from tests.kv.models import KINDS, executor, prompts, random_model

CLOSE = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return executor(request.param)


@pytest.fixture(scope="module")
def qwen():
    return executor("qwen3")


def cut_out(model, ids: list[int], start: int, stop: int) -> Document:
    """The native KV of a slice of a prompt as a document: compiled where it stands, behind its true prefix."""
    [row], _ = model.prefill([ids])
    span = slice(start, stop)
    block = KVBlock.from_rotated(
        ids[span], row.keys[:, span], row.values[:, span].clone(), model.rotation, model.geometry, model.identity, start
    )
    return Document(block)


def packet(model, seed: int = 3) -> Compiler:
    width = model.model.config.hidden_size
    return Compiler(model, envelope=Envelope(random(seed, 3, width), random(seed + 1, 2, width)))


def test_a_document_compiled_behind_its_true_prefix_gives_the_native_prefill(model):
    before, text, after = prompts((11, 17, 6))
    [native], expected = model.prefill([before + text + after])
    linked, row, logits = run(model, [before, cut_out(model, before + text + after, 11, 28), after])
    assert linked.plan.compute.tolist() == [*range(11), *range(28, 34)]
    torch.testing.assert_close(logits, expected[0], **CLOSE)
    torch.testing.assert_close(row.keys, native.keys, **CLOSE)
    torch.testing.assert_close(row.values, native.values, **CLOSE)


def test_prefix_and_documents_compiled_as_one_document_give_the_native_prefill(model):
    text, query = prompts((30, 5))
    [whole] = Compiler(model).compile([text])
    _, row, logits = run(model, [whole, query])
    [native], expected = model.prefill([text + query])
    torch.testing.assert_close(logits, expected[0], **CLOSE)
    torch.testing.assert_close(row.keys, native.keys, **CLOSE)


def test_documents_behind_other_text_do_not_give_the_native_prefill(model):
    """What the laws above would miss if documents saw each other or the prompt when they are compiled."""
    before, text, query = prompts((11, 17, 6))
    _, _, logits = run(model, [before, *Compiler(model).compile([text]), query])
    _, expected = model.prefill([before + text + query])
    assert not torch.allclose(logits, expected[0], atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("start", [1, 211])
def test_compiling_elsewhere_and_compiling_at_0_and_moving_are_the_same(kind, start):
    """Against the model as transformers runs it, at positions from `start` with nothing before them."""
    [text] = prompts((19,))
    native, cache = random_model(kind), DynamicCache()
    with torch.inference_mode():
        native(torch.tensor([text]), position_ids=torch.arange(start, start + 19)[None], past_key_values=cache)
    ours = executor(kind)
    [document] = Compiler(ours).compile([text])
    for layer, there in enumerate(cache.layers):
        moved = document.block.keys_at(layer, start, ours.rotation)
        torch.testing.assert_close(moved, there.keys[0].transpose(0, 1), **CLOSE)
        torch.testing.assert_close(document.block.values[layer], there.values[0].transpose(0, 1), **CLOSE)


@pytest.mark.parametrize("distance", [1, 7, 211, 8191])
def test_keys_moved_and_moved_back_are_unchanged(model, distance):
    [document] = Compiler(model).compile(prompts((9,)))
    positions = torch.arange(distance, distance + 9)
    there = model.rotation.rotate(document.block.keys, positions)
    torch.testing.assert_close(model.rotation.unrotate(there, positions), document.block.keys, rtol=0, atol=1e-4)


def test_values_of_layer_0_are_native_to_the_bit(model):
    before, text, after = prompts((11, 17, 6))
    _, row, _ = run(model, [before, *Compiler(model).compile([text]), after])
    [native], _ = model.prefill([before + text + after])
    torch.testing.assert_close(row.values[0], native.values[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(row.keys[0], native.keys[0], rtol=0, atol=1e-4)


def test_computing_every_document_token_gives_the_native_prefill(model):
    before, first, second, after = prompts((5, 9, 14, 6))
    documents = Compiler(model).compile([first, second])
    linked = link([before, documents[0], after, documents[1], after])
    cache = LinkedCache(model, linked)
    logits = cache.prefill(lambda linked, _reader: linked.computing(linked.candidates))
    [native], expected = model.prefill([before + first + after + second + after])
    torch.testing.assert_close(logits, expected, **CLOSE)
    torch.testing.assert_close(cache.row.values, native.values, **CLOSE)


def test_documents_compiled_together_are_those_compiled_alone(model):
    texts = prompts((9, 1, 23, 14))
    for text, document in zip(texts, Compiler(model).compile(texts), strict=True):
        [alone] = Compiler(model).compile([text])
        torch.testing.assert_close(document.block.keys, alone.block.keys, **CLOSE)
        torch.testing.assert_close(document.block.values, alone.block.values, **CLOSE)
        assert document.ids == text


def test_a_batch_of_linked_prompts_gives_what_single_ones_give(model):
    before, first, second, after = prompts((5, 9, 14, 6))
    one, other = Compiler(model).compile([first, second])
    orders = [[before, one, other, after], [other, after], [before, other, before, one, after]]
    caches = [LinkedCache(model, link(spans)) for spans in orders]
    together = model.run(
        [cache.row for cache in caches],
        [cache.linked.tokens.tolist() for cache in caches],
        [cache.linked.plan for cache in caches],
    )
    for spans, logits in zip(orders, together, strict=True):
        torch.testing.assert_close(logits, run(model, spans)[2], **CLOSE)


def test_an_inline_token_sees_nothing_that_stands_behind_it(model):
    before, first, second, third, after = prompts((5, 9, 14, 14, 6))
    one, two, other = Compiler(model).compile([first, second, third])
    _, row, logits = run(model, [before, one, after, two, after])
    _, changed, other_logits = run(model, [before, one, after, other, after])
    earlier = slice(0, 5 + 9 + 6)
    assert torch.equal(row.keys[:, earlier], changed.keys[:, earlier])
    assert torch.equal(row.values[:, earlier], changed.values[:, earlier])
    assert not torch.allclose(logits, other_logits, atol=1e-2)


def test_the_order_in_which_documents_are_written_is_no_matter(qwen):
    before, first, second, after = prompts((5, 9, 14, 6))
    linked = link([before, *Compiler(qwen).compile([first, second]), after])
    rows = []
    for placed in (linked.placed, linked.placed[::-1]):
        row = qwen.row(len(linked))
        for one in placed:
            qwen.fill_block(row, one.document.block, one.start)
        rows.append(row)
    both = [qwen.run([row], [linked.tokens.tolist()], [linked.plan]) for row in rows]
    assert torch.equal(*both)


@pytest.mark.parametrize("first", [True, False])
def test_documents_may_stand_first_or_last(model, first):
    text, other = prompts((13, 8))
    spans = [*Compiler(model).compile([text]), other] if first else [other, *Compiler(model).compile([text])]
    linked, row, logits = run(model, spans)
    assert len(linked.plan.filled) == (13 if first else 12)
    assert row.length == 21
    if first:
        torch.testing.assert_close(logits, model.prefill([text + other])[1][0], **CLOSE)


def test_a_packets_own_keys_see_its_header_and_its_entries_take_positions(model):
    text, query = prompts((9, 6))
    [plain], [wrapped] = Compiler(model).compile([text]), packet(model).compile([text])
    assert (wrapped.header, wrapped.trailer, wrapped.ids) == (3, 2, text)
    assert wrapped.block.tokens.tolist() == [SOFT] * 3 + text + [SOFT] * 2
    assert not torch.allclose(wrapped.block.values[1, 3:12], plain.block.values[1], atol=1e-2)
    linked, _, _ = run(model, [wrapped, query])
    assert linked.plan.compute.tolist() == list(range(14, 20))


def test_an_envelope_of_tokens_embeddings_is_a_longer_document(model):
    """Learned embeddings run as tokens do: with those of real tokens the KV is the longer text's."""
    head, text, tail = prompts((3, 9, 2))
    table = model.model.model.embed_tokens.weight.detach()
    compiler = Compiler(model, envelope=Envelope(table[head], table[tail]))
    [wrapped], [longer] = compiler.compile([text]), Compiler(model).compile([head + text + tail])
    torch.testing.assert_close(wrapped.block.keys, longer.block.keys, **CLOSE)
    torch.testing.assert_close(wrapped.block.values, longer.block.values, **CLOSE)


def test_the_writer_is_on_while_documents_are_compiled_and_only_then(qwen):
    states = []

    @contextmanager
    def writing():
        states.append("on")
        yield
        states.append("off")

    compiler = Compiler(qwen, writing)
    assert compiler.method is Method.SEMPIC and not states
    compiler.compile(prompts((4, 5)))
    assert states == ["on", "off"]


def test_a_method_is_what_the_compiler_was_given(qwen):
    envelope = packet(qwen).envelope
    found = [Compiler(qwen).method, packet(qwen).method, Compiler(qwen, lambda: None, envelope).method]
    assert found == [Method.PLAIN, Method.PACKET, Method.JOINT]


def test_nothing_to_compile_gives_nothing_and_an_empty_document_is_refused(qwen):
    assert Compiler(qwen).compile([]) == []
    with pytest.raises(DocumentError, match="0 tokens"):
        Compiler(qwen).compile([[1, 2], []])


def test_a_document_of_another_model_is_not_written(qwen):
    [foreign] = Compiler(executor("llama")).compile(prompts((5,)))
    with pytest.raises(BlockError, match="of model"):
        LinkedCache(qwen, link([foreign, [1, 2]]))
