"""Laws of the Writer: off, it is the base model to the bit; on, it is the adapter; on disk, it belongs to one base."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from sglang_ext.documents.adapter import MANIFEST, Base, Manifest, load_compiler, read_manifest, save_adapter
from sglang_ext.documents.checkpointing import checkpointed
from sglang_ext.documents.compilers import Compiler, Method
from sglang_ext.documents.writer import Writer, lora_config
from sglang_ext.errors import DocumentError
from sglang_ext.offline.executor import TransformersExecutor
from tests.documents.writers import KINDS, LENGTHS, METHODS, record, trainable
from tests.kv.builders import one_thread, same_bits  # noqa: F401
from tests.kv.models import executor, prompts, random_model

IDS = torch.tensor(prompts((23,)))
TEXTS = prompts(LENGTHS, seed=5)


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_off_it_is_the_base_model_to_the_bit(kind):
    model = random_model(kind)
    before = logits(model)
    writer = Writer(model, lora_config(4, 16))
    for parameter in writer.parameters.values():
        parameter.data.normal_()
    assert same_bits(logits(model), before)
    with writer.writing():
        assert not same_bits(logits(model), before)
    assert same_bits(logits(model), before)
    with pytest.raises(KeyError), writer.writing():
        raise KeyError
    assert same_bits(logits(model), before)


@pytest.mark.parametrize("kind", KINDS)
def test_training_leaves_the_reader_as_it_was(kind):
    made = trainable(kind)
    model = made.executor.model
    before, weights = (
        read(made.executor),
        {name: one.clone() for name, one in model.state_dict().items() if "lora" not in name},
    )
    [found] = made.student(checkpointed).logits([record()], [[1, 2]])
    found.sum().backward()
    torch.optim.AdamW(made.parameters.values(), lr=0.1).step()
    assert same_bits(read(made.executor), before)
    assert all(same_bits(one, model.state_dict()[name]) for name, one in weights.items())


def read(one: TransformersExecutor) -> torch.Tensor:
    """What the executor's model says as the Reader."""
    _, last = one.prefill([IDS[0].tolist()])
    return last


def test_a_new_writer_writes_as_the_base_does():
    one = executor("qwen3")
    plain = Compiler(one).compile(TEXTS)
    writer = Writer(one.model, lora_config(4, 16), seed=3)
    for document, other in zip(plain, Compiler(one, writer.writing).compile(TEXTS), strict=True):
        assert document.block.keys.equal(other.block.keys)


def test_the_parameters_are_a_function_of_the_seed():
    first, again, other = (Writer(random_model("llama"), lora_config(4, 16), seed=seed).state() for seed in (1, 1, 2))
    assert all(one.equal(again[name]) for name, one in first.items())
    assert not all(one.equal(other[name]) for name, one in first.items())


def test_making_a_writer_draws_nothing_from_the_common_generator():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    Writer(random_model_without_seed(), lora_config(4, 16), seed=1)
    assert torch.rand(3).equal(expected)


def random_model_without_seed():
    with torch.random.fork_rng():
        return random_model("qwen3")


def test_parameters_stay_trainable_and_the_base_frozen():
    made = trainable()
    with made.writer.writing():
        pass
    assert all(parameter.requires_grad for parameter in made.parameters.values())
    trained = {name for name, one in made.executor.model.named_parameters() if one.requires_grad}
    assert trained == set(made.writer.parameters)


def test_two_writers_of_one_model_do_not_disturb_each_other():
    model = random_model("qwen3")
    plain = logits(model)
    writers = [Writer(model, lora_config(rank, 16), name=f"writer_{rank}") for rank in (2, 4)]
    for writer in writers:
        for parameter in writer.parameters.values():
            parameter.data.normal_()
    seen = []
    for writer in (*writers, *writers):
        with writer.writing():
            seen.append(logits(model))
    assert same_bits(seen[0], seen[2]) and same_bits(seen[1], seen[3]) and not seen[0].equal(seen[1])
    assert same_bits(logits(model), plain)
    assert {tuple(one.shape)[0] for name, one in writers[0].state().items() if "lora_A" in name} == {2}


def test_other_families_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    with pytest.raises(DocumentError, match="llama or qwen3, this one is 'gpt2'"):
        Writer(model, lora_config(4, 16))


def saved(made, folder, **base) -> Manifest:
    who = made.executor.identity
    named = {"name": "base", "model": who.model, "tokenizer": who.tokenizer, "dtype": "float32", **base}
    manifest = Manifest(
        base=Base(**named), settings=made.settings, data="words", data_digest="0", records=1, updates=1, loss=(1.0,)
    )
    return save_adapter(folder, made, manifest)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_compiles_as_what_was_trained(tmp_path, kind, method):
    made = trainable(kind, method)
    manifest = saved(made, tmp_path)
    assert read_manifest(tmp_path) == manifest
    fresh = executor(kind)
    before = read(fresh)
    compiler = load_compiler(fresh, tmp_path)
    assert compiler.method is Method(method)
    assert same_bits(read(fresh), before)
    student = made.student(checkpointed)
    keys, _ = student._write(TEXTS)
    blocks = torch.cat([document.block.keys for document in compiler.compile(TEXTS)], dim=1)
    torch.testing.assert_close(blocks, torch.stack(keys).detach(), atol=1e-5, rtol=1e-5)


def test_peft_itself_reads_the_adapter(tmp_path):
    made = trainable("llama")
    saved(made, tmp_path)
    with made.writer.writing():
        expected = read(made.executor)
    other = executor("llama")
    PeftModel.from_pretrained(other.model, str(tmp_path))  # puts its layers into the model itself
    assert same_bits(read(other), expected)


def test_the_same_adapter_gives_the_same_bytes_and_digest(tmp_path):
    first, again = (saved(trainable("qwen3", "joint"), tmp_path / name) for name in ("a", "b"))
    assert first == again and first.digest == again.digest
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    other = saved(trainable("qwen3", "joint", strength=0.2), tmp_path / "c")
    assert other.digest != first.digest


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_an_adapter_for_another_base_is_refused(tmp_path, what):
    made = trainable()
    saved(made, tmp_path, **{what: "f" * 64})
    with pytest.raises(DocumentError, match=f"trained on 'base' with {what} ffffffffffff, found"):
        load_compiler(executor("qwen3"), tmp_path)


def test_files_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    made = trainable("qwen3", "joint")
    saved(made, tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(str(path))
    save_file({name: one + 1 for name, one in tensors.items()}, str(path))
    with pytest.raises(DocumentError, match="is not the file that writer.json names"):
        load_compiler(executor("qwen3"), tmp_path)
    path.write_bytes(whole)
    load_compiler(executor("qwen3"), tmp_path)
    (tmp_path / "soft_tokens.safetensors").unlink()
    with pytest.raises(DocumentError, match="soft_tokens.safetensors cannot be read"):
        load_compiler(executor("qwen3"), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"method": "warp"}, "settings.method"), ({"extra": 1}, "extra"), ({"format": 2}, "format")],
)
def test_a_malformed_manifest_is_refused_by_its_field(tmp_path, change, message):
    saved(trainable(), tmp_path)
    data = json.loads((tmp_path / MANIFEST).read_text())
    data = {**data, "settings": {**data["settings"], **change}} if "method" in change else {**data, **change}
    (tmp_path / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(DocumentError, match=message):
        read_manifest(tmp_path)


def test_an_adapter_of_another_shape_is_refused():
    state = Writer(random_model("qwen3", layers=2), lora_config(4, 16)).state()
    with pytest.raises(DocumentError, match="layers.2.self_attn.k_proj.lora_A.weight is None, expected"):
        Writer(random_model("qwen3", layers=3), lora_config(4, 16)).restore(state)


def test_a_folder_without_a_manifest_is_refused(tmp_path):
    with pytest.raises(DocumentError, match="writer.json cannot be read.*expected an adapter's folder"):
        load_compiler(executor("qwen3"), tmp_path)
