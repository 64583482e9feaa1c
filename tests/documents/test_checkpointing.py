"""Laws of KV gradient checkpointing: the same keys, values, loss and gradients, and nothing kept but what crosses layers."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from sglang_ext.documents.checkpointing import checkpointed, direct, write
from sglang_ext.documents.compilers import Compiler, Envelope
from tests.documents.writers import KINDS, LENGTHS, METHODS, embedded, gradients, record, trainable
from tests.kv.builders import one_thread, random  # noqa: F401
from tests.kv.models import VOCABULARY, prompts

WAYS = (direct, checkpointed)


def loss_and_gradients(kind: str, method: str, run):
    made = trainable(kind, method)
    logits = made.student(run).logits([record(0), record(1)], [[3, 1, 4], [1, 5]])
    loss = sum((one * random(7, *one.shape)).sum() for one in logits)
    loss.backward()
    return loss.detach(), gradients(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_direct_and_checkpointed_give_the_same_loss_and_gradients(kind, method):
    (loss, found), (again, other) = (loss_and_gradients(kind, method, run) for run in WAYS)
    assert loss.equal(again)
    assert found.keys() == other.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (other[name] is None), name
        assert gradient is None or gradient.equal(other[name]), name


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_reaches_all_that_makes_keys_and_values(method):
    """Only keys and values are exported: the last layer's queries and outputs have no part in them."""
    _, found = loss_and_gradients("qwen3", method, checkpointed)
    for name, gradient in found.items():
        last_unread = "layers.2." in name and ("q_proj" in name or "o_proj" in name)
        assert (gradient is None or not gradient.any()) == last_unread, name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", WAYS)
def test_gradients_are_those_of_keys_and_values(kind, run):
    """A step against the gradient changes a sum of keys and values by as much as the gradient says."""
    made = trainable(kind)
    documents = embedded(made.executor)

    def total() -> torch.Tensor:
        sides = write(made.executor, documents, made.writer.writing, run)
        return sum((one * random(n, *one.shape)).sum() for side in sides for n, one in enumerate(side))

    total().backward()
    length = torch.stack([p.grad.square().sum() for p in made.parameters.values() if p.grad is not None]).sum()
    step = 1e-3 / length.sqrt()
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            for parameter in made.parameters.values():
                if parameter.grad is not None:
                    parameter += sign * step * parameter.grad
            values.append(total())
            for parameter in made.parameters.values():
                if parameter.grad is not None:
                    parameter -= sign * step * parameter.grad
    assert float((values[0] - values[1]) / (2 * step)) == pytest.approx(float(length), rel=0.02)


def saved_bytes(made, documents, run) -> tuple[int, list[torch.Tensor]]:
    """Bytes that the Writer's forward keeps for its backward pass, each storage once, parameters and tables aside."""
    base = {p.untyped_storage().data_ptr() for p in made.executor.model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if tensor.requires_grad and storage.data_ptr() not in base:
            kept[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        keys, values = write(made.executor, documents, made.writer.writing, run)
    return sum(storage.nbytes() for storage in kept.values()), [*keys, *values]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_checkpointing_keeps_of_a_layer_its_input_and_its_kv(kind, kv_heads):
    made = trainable(kind, kv_heads=kv_heads)
    geometry, hidden = made.executor.geometry, made.executor.model.config.hidden_size
    documents = [one.requires_grad_() for one in embedded(made.executor)]
    kept, kv = saved_bytes(made, documents, checkpointed)
    assert kept == geometry.layers * sum(LENGTHS) * hidden * 4
    assert sum(one.nbytes for one in kv) == geometry.layers * sum(LENGTHS) * 2 * geometry.width * 4
    if kv_heads == 1:  # a hidden state as wide as a key and a value, as in most models: exactly the KV's bytes
        assert kept == sum(one.nbytes for one in kv)
    assert saved_bytes(made, documents, direct)[0] > 5 * kept


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("run", WAYS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_trained_is_what_is_compiled(kind, run, method):
    made = trainable(kind, method)
    student = made.student(run)
    texts = prompts(LENGTHS, seed=5, vocabulary=VOCABULARY)
    keys, values = student._write(texts)
    envelope = None if made.header is None else Envelope(made.header.detach(), made.trailer.detach())
    writing = None if made.writer is None else made.writer.writing
    at = 0
    for document in Compiler(made.executor, writing, envelope).compile(texts):
        span = slice(at, at + len(document))
        torch.testing.assert_close(torch.stack(keys)[:, span], document.block.keys, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(torch.stack(values)[:, span], document.block.values, atol=1e-5, rtol=1e-5)
        at = span.stop
    assert at == len(keys[0])


@pytest.mark.parametrize("run", WAYS)
def test_no_document_sees_another(run):
    made = trainable()
    documents = embedded(made.executor)
    before = write(made.executor, documents, made.writer.writing, run)
    documents[1] = documents[1] + 1
    after = write(made.executor, documents, made.writer.writing, run)
    first, last = slice(0, LENGTHS[0]), slice(LENGTHS[0] + LENGTHS[1], None)
    for side, other in zip(before, after, strict=True):
        for one, changed in zip(side, other, strict=True):
            assert one[first].equal(changed[first]) and one[last].equal(changed[last])
            assert not one[LENGTHS[0]].equal(changed[LENGTHS[0]])
