"""Blocks through shared memory: right bytes, bounded, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import TransferError
from sglang_ext.worker.transport import SharedMemory
from tests.worker.blocks import random_block, same


@pytest.fixture
def block() -> KVBlock:
    return random_block()


def test_a_block_arrives_as_it_was_and_its_handle_is_spent(tmp_path: Path, block: KVBlock):
    transport = SharedMemory(1 << 20, tmp_path)
    handle = transport.publish(block)
    assert same(transport.fetch(handle), block)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TransferError, match="is gone"):
        transport.fetch(handle)


def test_the_memory_of_a_fetched_block_stays_valid(tmp_path: Path, block: KVBlock):
    """The reader unlinks what it has mapped: the pages live until the tensors do not."""
    transport = SharedMemory(1 << 20, tmp_path)
    got = transport.fetch(transport.publish(block))
    assert torch.equal(got.keys.clone(), block.keys)


def test_a_block_over_the_limit_is_refused(tmp_path: Path, block: KVBlock):
    with pytest.raises(TransferError, match=f"{block.nbytes} bytes, over the limit of 100"):
        SharedMemory(100, tmp_path).publish(block)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("handle", ["", "../x", "/etc/passwd", "kvlift-1-zz", "kvlift-1-" + "0" * 31])
def test_only_own_handles_are_opened(tmp_path: Path, handle: str):
    transport = SharedMemory(1 << 20, tmp_path)
    for use in (transport.fetch, transport.drop):
        with pytest.raises(TransferError, match="not a block handle"):
            use(handle)


@pytest.mark.parametrize("other", ["", "../x", "1" * 32])
def test_a_block_is_withdrawn_by_its_request_alone(tmp_path: Path, block: KVBlock, other: str):
    transport = SharedMemory(1 << 20, tmp_path)
    handle = transport.publish(block, "0" * 32)
    transport.withdraw(other)
    assert [path.name for path in tmp_path.iterdir()] == [handle]
    transport.withdraw("0" * 32)
    transport.withdraw("0" * 32)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_frees_dead_writers_blocks_only(tmp_path: Path, block: KVBlock):
    transport = SharedMemory(1 << 20, tmp_path)
    own = transport.publish(block)
    dead, alive = (tmp_path / f"kvlift-{pid}-{'0' * 32}" for pid in (2**22 + 1, os.getppid()))
    for path in (dead, alive):
        path.write_bytes(b"x")
    (tmp_path / "kvlift-notes.txt").write_text("not ours")
    assert transport.sweep() == 1
    assert {path.name for path in tmp_path.iterdir()} == {own, alive.name, "kvlift-notes.txt"}


def test_a_blocks_file_goes_on_as_it_is(tmp_path: Path, block: KVBlock):
    """What a carrier does at either end: the file out of one memory, its bytes into another one."""
    here, there = SharedMemory(1 << 20, tmp_path / "here"), SharedMemory(1 << 20, tmp_path / "there")
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    handle = here.publish(block)
    with here.take_file(handle) as file:
        assert list((tmp_path / "here").iterdir()) == []
        assert same(there.fetch(there.publish_file(memoryview(file.read()))), block)
    with pytest.raises(TransferError, match="is gone"):
        here.take_file(handle)


def test_a_place_names_the_memory_file_system_and_not_the_folder(tmp_path: Path):
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir(), other.mkdir()
    assert SharedMemory(1, one).place == SharedMemory(1, other).place
    assert SharedMemory(1, one).place != SharedMemory(1, Path("/proc")).place
