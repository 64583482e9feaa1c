"""Laws of a block: what is saved is what is loaded, bit for bit, or nothing is."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.block import KVBlock
from sglang_ext.errors import BlockError
from sglang_ext.rope import Rotation
from tests.kv.builders import geometry, identity, laws, random, random_block, same_bits

DTYPES = [torch.float32, torch.bfloat16]


def same(one: KVBlock, other: KVBlock) -> bool:
    tensors = all(same_bits(getattr(one, name), getattr(other, name)) for name in ("tokens", "keys", "values"))
    return tensors and (one.geometry, one.identity) == (other.geometry, other.identity)


def load(data: bytes, path: Path) -> KVBlock:
    path.write_bytes(data)
    return KVBlock.load(path)


def wrongly_loaded(data: bytes, original: KVBlock, path: Path) -> str | None:
    """What `load` did with changed bytes, where it neither refused them nor gave the same block."""
    try:
        loaded = load(data, path)
    except BlockError:
        return None
    except Exception as error:
        return repr(error)
    return None if same(loaded, original) else "another block, silently"


class Saved:
    """A saved block with its bytes; the first `header` bytes are not tensors."""

    def __init__(self, folder: Path) -> None:
        self.block = random_block(geometry(layers=1, kv_heads=1, query_heads=2), 5, dtype=torch.bfloat16)
        self.path = folder / "block"
        self.block.save(self.path)
        self.data = self.path.read_bytes()
        self.header = 8 + struct.unpack("<Q", self.data[:8])[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return Saved(tmp_path_factory.mktemp("block"))


@laws
@given(
    layers=st.integers(1, 3), kv_heads=st.integers(1, 3), length=st.integers(1, 9), seed=st.integers(0, 99),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_load_gives_what_was_saved(tmp_path_factory, layers, kv_heads, length, seed, dtype):
    block = random_block(geometry(layers=layers, kv_heads=kv_heads), length, seed, dtype=dtype)
    path = tmp_path_factory.mktemp("block") / "block"
    block.save(path)
    assert same(KVBlock.load(path), block)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_that_are_no_ordinary_numbers_survive(tmp_path, dtype):
    block = random_block(geometry(), 4, dtype=dtype)
    block.values[0, 0, 0] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-40], dtype=dtype)
    block.save(tmp_path / "block")
    assert same(KVBlock.load(tmp_path / "block"), block)


def test_views_are_saved_as_their_own_numbers(tmp_path):
    both = random(0, 2, 2, 6, 2, 4)
    block = KVBlock(torch.arange(6), both[0], both[1], geometry(), identity())
    for number, one in enumerate((block, block.span(2, 5))):
        one.save(tmp_path / str(number))
        assert same(KVBlock.load(tmp_path / str(number)), one)


@laws
@given(data=st.data())
def test_a_changed_byte_among_the_tensors_is_refused(saved, data):
    at = data.draw(st.integers(saved.header, len(saved.data) - 1))
    mask = data.draw(st.integers(1, 255))
    changed = bytearray(saved.data)
    changed[at] ^= mask
    with pytest.raises(BlockError):
        load(bytes(changed), saved.path.with_name("changed"))


def test_a_changed_byte_in_the_header_is_refused_or_changes_nothing(saved):
    wrong = {}
    for at in range(saved.header):
        for mask in (0x01, 0x0F):
            changed = bytearray(saved.data)
            changed[at] ^= mask
            outcome = wrongly_loaded(bytes(changed), saved.block, saved.path.with_name("changed"))
            if outcome:
                wrong.setdefault(outcome, []).append(saved.data[max(0, at - 12) : at + 6])
    assert {outcome: (len(places), places[:3]) for outcome, places in wrong.items()} == {}


@pytest.mark.parametrize(("old", "new"), [(b'"F32"', b'"I32"'), (b'"BF16"', b'"I16" '), (b'"I64"', b'"F64"')])
def test_bytes_under_another_dtype_are_refused(saved, old, new):
    assert old in saved.data[: saved.header]
    changed = saved.data.replace(old, new, 1)
    assert wrongly_loaded(changed, saved.block, saved.path.with_name("changed")) is None


def test_a_truncated_file_is_refused(saved):
    lengths = [*range(0, len(saved.data), 7), saved.header - 1, saved.header, len(saved.data) - 1]
    wrong = {n: wrongly_loaded(saved.data[:n], saved.block, saved.path.with_name("short")) for n in lengths}
    assert {n: outcome for n, outcome in wrong.items() if outcome} == {}
    with pytest.raises(BlockError):
        load(saved.data[:-1], saved.path.with_name("short"))


def test_a_longer_file_is_refused(saved):
    with pytest.raises(BlockError):
        load(saved.data + b"\0", saved.path.with_name("long"))


def test_a_file_that_is_no_block_is_refused(tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(BlockError, match="absent"):
        KVBlock.load(tmp_path / "absent")
    save_file({"keys": torch.zeros(2)}, str(tmp_path / "other"))
    with pytest.raises(BlockError, match="format None"):
        KVBlock.load(tmp_path / "other")
    save_file({"keys": torch.zeros(2)}, str(tmp_path / "next"), metadata={"kvlift": json.dumps({"format": 2})})
    with pytest.raises(BlockError, match="format 2, expected 1"):
        KVBlock.load(tmp_path / "next")


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("shape", [(2, 4, 2, 4), (2, 5, 1, 4), (2, 5, 2, 2), (1, 5, 2, 4), (2, 5, 8)])
def test_a_wrong_shape_is_refused_by_name(name, shape):
    tensors = {"keys": torch.zeros(2, 5, 2, 4), "values": torch.zeros(2, 5, 2, 4), name: torch.zeros(shape)}
    with pytest.raises(BlockError, match=f"{name} have shape"):
        KVBlock(torch.arange(5), tensors["keys"], tensors["values"], geometry(), identity())


@pytest.mark.parametrize("name", ["keys", "values"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_are_not_finite_are_found(name, number):
    block = random_block(geometry(), 5, dtype=torch.bfloat16)
    block.check_finite()
    getattr(block, name)[1, 4, 1, 3] = number
    with pytest.raises(BlockError, match=f"{name} hold NaN or infinite"):
        block.check_finite()


@laws
@given(length=st.integers(1, 8), extra=st.integers(0, 3), data=st.data())
def test_only_a_prompt_that_begins_with_the_blocks_tokens_fits(length, extra, data):
    block = random_block(geometry(), length)
    ids = block.tokens.tolist() + [1] * extra
    block.check_tokens(ids)
    at = data.draw(st.integers(0, length - 1))
    with pytest.raises(BlockError, match="not a prefix"):
        block.check_tokens([*ids[:at], ids[at] + 1, *ids[at + 1 :]])
    with pytest.raises(BlockError, match="not a prefix"):
        block.check_tokens(ids[: length - 1])


def test_a_span_is_a_view():
    block = random_block(geometry(), 8)
    part = block.span(2, 5)
    assert len(part) == 3
    assert part.tokens.tolist() == block.tokens[2:5].tolist()
    part.keys[1, 0, 0, 0] = 42.0
    part.values[0, 2, 1, 3] = 43.0
    assert block.keys[1, 2, 0, 0] == 42.0
    assert block.values[0, 4, 1, 3] == 43.0
    assert (part.geometry, part.identity) == (block.geometry, block.identity)


def test_bytes_are_counted():
    assert random_block(geometry(), 5, dtype=torch.bfloat16).nbytes == 5 * 8 + 80 * 4 + 80 * 2


@laws
@given(start=st.integers(0, 9000), again=st.integers(0, 9000), layer=st.integers(0, 1))
def test_rotated_keys_come_back_at_any_position(start, again, layer):
    shape = geometry()
    rotation = Rotation(shape.rope)
    free = random_block(shape, 6)
    lying = torch.stack([free.keys_at(i, start, rotation) for i in range(shape.layers)])
    block = KVBlock.from_rotated(free.tokens.tolist(), lying, free.values, rotation, shape, identity(), start)
    torch.testing.assert_close(block.keys, free.keys, rtol=0, atol=2e-6)
    assert block.keys.dtype == torch.float32 and block.tokens.dtype == torch.int64
    expected = rotation.rotate(free.keys[layer], torch.arange(again, again + 6))
    torch.testing.assert_close(block.keys_at(layer, again, rotation), expected, rtol=0, atol=4e-6)
