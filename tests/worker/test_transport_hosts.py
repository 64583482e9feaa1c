"""Blocks between two hosts (network namespaces) over TCP: two processes, one of which dies, or loses its network.

Skipped, with the reason, where namespaces are not permitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_ext.worker.transport import SharedMemory
from tests.worker.blocks import random_block, same
from tests.worker.namespaces import Host, two_hosts
from tests.worker.peer import Peer

pytest.importorskip(
    "mooncake.engine", exc_type=ImportError, reason="Mooncake, or Debian's libibverbs1, is not installed"
)

MEMORY = Path("/dev/shm")
BUFFER = 64 << 20
TIMEOUT_S = 2.0
LONG_BYTES = 24 << 20
MBIT = 100
"""At this rate the long block takes about two seconds: something can happen to it meanwhile."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    with two_hosts() as hosts:
        yield hosts


@pytest.fixture(scope="module")
def started(hosts: tuple[Host, Host]) -> Iterator[list[Peer]]:
    peers = [Peer(host.address, BUFFER, TIMEOUT_S, host.run) for host in hosts]
    yield peers
    for peer in peers:
        peer.kill()


@pytest.fixture
def peers(hosts: tuple[Host, Host], started: list[Peer]) -> tuple[Peer, Peer]:
    """A source and a target that have met: they have exchanged a block. One that was killed is there again."""
    for side, host in enumerate(hosts):
        if started[side].process.poll() is not None:
            started[side] = Peer(host.address, BUFFER, TIMEOUT_S, host.run)
    exchanged(*started)
    return started[0], started[1]


def exchanged(source: Peer, target: Peer) -> None:
    """One block from here to there, exactly, and nothing left of it."""
    memory, block = SharedMemory(BUFFER), random_block(300, attention=True)
    handle = source.ask("offer", local=memory.publish(block))["handle"]
    got = target.ask("collect", handle=handle, timeout_s=30)
    assert same(memory.fetch(got["local"]), block)
    source.ask("drop", handle=handle)
    assert source.ask("held")["held"] == target.ask("held")["held"] == 0


@contextmanager
def under_way(hosts: tuple[Host, Host], source: Peer, target: Peer, timeout_s: float) -> Iterator[int]:
    """Inside the block a long transfer runs. Gives the question that it will answer."""
    handle = source.ask("offer", local=SharedMemory(BUFFER).publish_file(memoryview(b"x" * LONG_BYTES)))["handle"]
    hosts[0].slow_down(MBIT)
    try:
        collecting = target.send("collect", handle=handle, timeout_s=timeout_s)
        target.ask("until_begun")
        yield collecting
    finally:
        hosts[0].speed_up()
        if source.process.poll() is None:
            source.ask("drop", handle=handle)


@contextmanager
def pulled(host: Host) -> Iterator[None]:
    """Inside the block the host's cable is out."""
    host.connect(False)
    try:
        yield
    finally:
        host.connect(True)


def left_by(peer: Peer) -> list[Path]:
    return list(MEMORY.glob(f"kvlift-{peer.process.pid}-*"))


def test_a_block_arrives_exactly_either_way(peers: tuple[Peer, Peer]):
    source, target = peers
    exchanged(target, source)
    exchanged(source, target)


def test_a_source_killed_in_mid_transfer_is_an_error_at_once_and_the_buffer_is_free(
    hosts: tuple[Host, Host], peers: tuple[Peer, Peer]
):
    """Case 41."""
    source, target = peers
    with under_way(hosts, source, target, timeout_s=60) as collecting:
        source.kill()
        answer = target.answer(collecting)
    assert answer["error"].startswith("TransferError") and "broke off" in answer["error"]
    assert target.ask("held")["held"] == 0 and left_by(target) == []


def test_a_network_that_goes_away_in_mid_transfer_is_an_error_in_time_and_the_buffer_is_free_later(
    hosts: tuple[Host, Host], peers: tuple[Peer, Peer]
):
    """No error comes back over a pulled cable: only time tells. Afterwards both ends work again."""
    source, target = peers
    with under_way(hosts, source, target, timeout_s=1.0) as collecting, pulled(hosts[0]):
        answer = target.answer(collecting)
        assert answer["error"].startswith("TransferError"), answer
        target.ask("until_freed")
    assert left_by(target) == []
    exchanged(target, source)


def test_a_target_killed_in_mid_transfer_leaves_the_source_whole(hosts: tuple[Host, Host], peers: tuple[Peer, Peer]):
    source, target = peers
    with under_way(hosts, source, target, timeout_s=60):
        target.kill()
    assert left_by(target) == []
    assert source.ask("held")["held"] == 0


def test_a_source_that_cannot_be_reached_is_an_error_in_time(hosts: tuple[Host, Host], peers: tuple[Peer, Peer]):
    source, _ = peers
    stranger = Peer(hosts[1].address, BUFFER, TIMEOUT_S, hosts[1].run)
    try:
        handle = source.ask("offer", local=SharedMemory(BUFFER).publish(random_block(3)))["handle"]
        with pulled(hosts[0]):
            answer = stranger.ask("collect", handle=handle, timeout_s=1.0)
            assert answer["error"].startswith("TransferError"), answer
            stranger.ask("until_freed")
    finally:
        stranger.kill()
    source.ask("drop", handle=handle)
