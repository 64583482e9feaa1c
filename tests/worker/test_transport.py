"""Blocks through shared memory: right bytes, bounded, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_ext.block import KVBlock
from sglang_ext.errors import TransferError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.rope import RopeSpec
from sglang_ext.worker.transport import SharedMemory


@pytest.fixture
def block() -> KVBlock:
    geometry = KVGeometry(layers=2, query_heads=4, kv_heads=2, head_dim=8, rope=RopeSpec("default", 1e4, 8))
    keys, values = torch.randn(2, 2, 5, 2, 8)
    return KVBlock(torch.arange(5), keys, values, geometry, ModelIdentity("m", "t", "c"))


def test_a_block_arrives_as_it_was_and_its_handle_is_spent(tmp_path: Path, block: KVBlock):
    transport = SharedMemory(1 << 20, tmp_path)
    handle = transport.publish(block)
    got = transport.fetch(handle)
    assert torch.equal(got.keys, block.keys) and torch.equal(got.values, block.values)
    assert got.geometry == block.geometry and got.identity == block.identity
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


def test_a_sweep_frees_dead_writers_blocks_only(tmp_path: Path, block: KVBlock):
    transport = SharedMemory(1 << 20, tmp_path)
    own = transport.publish(block)
    dead, alive = (tmp_path / f"kvlift-{pid}-{'0' * 32}" for pid in (2**22 + 1, os.getppid()))
    for path in (dead, alive):
        path.write_bytes(b"x")
    (tmp_path / "kvlift-notes.txt").write_text("not ours")
    assert transport.sweep() == 1
    assert {path.name for path in tmp_path.iterdir()} == {own, alive.name, "kvlift-notes.txt"}
