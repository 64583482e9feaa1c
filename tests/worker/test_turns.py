"""Whose turn it is: jobs wait for the requests of the jobs before them, and never for long."""

from __future__ import annotations

import time
from array import array

import pytest

from sglang_ext.worker.leases import Asked, Leased, Leases
from sglang_ext.worker.turns import PATIENCE, Turns


class Tree:
    """Locks are names; `locked` are those that are held."""

    def __init__(self) -> None:
        self.locked: list[str] = []

    def lock(self, node: str) -> str:
        self.locked.append(node)
        return node

    def unlock(self, lock: str) -> None:
        self.locked.remove(lock)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def prefix(name: str) -> Leased:
    """What is leased under a name: all in one namespace, each its own tokens."""
    return Leased.of("lifted", list(name.encode()))


def asked(*names: str) -> list[Asked]:
    """Requests that continue what is leased under these names."""
    return [Asked("lifted", array("q", [*name.encode(), 1, 2])) for name in names]


def batch(turns: Turns, leases: Leases, clock: Clock, *names: str, seconds: float = 2.0) -> None:
    """A batch of jobs, each with a lease under its name."""
    with turns.of_jobs():
        clock.now += seconds
        for name in names:
            leases.take(name, name, prefix(name), 10.0)


def test_without_a_lease_nobody_waits(clock: Clock):
    leases = Leases(Tree())
    turns = Turns(leases)
    assert turns.jobs_may_run
    batch(turns, leases, clock)
    assert turns.jobs_may_run


def test_jobs_wait_until_each_request_of_the_last_batch_has_left_the_queue(clock: Clock):
    leases = Leases(tree := Tree())
    turns = Turns(leases)
    batch(turns, leases, clock, "a", "b")
    seen = []
    for waiting in ([], ["a"], ["b"], ["b", "another"], ["another"]):
        leases.tick(asked(*waiting))
        seen.append(turns.jobs_may_run)
        clock.now += 0.01
    assert seen == [False, False, False, False, True] and tree.locked == []


def test_a_client_that_never_comes_costs_a_share_of_one_batch(clock: Clock):
    leases = Leases(tree := Tree())
    turns = Turns(leases)
    batch(turns, leases, clock, "gone", seconds=2.0)
    clock.now += 2.0 * PATIENCE - 0.01
    assert not turns.jobs_may_run
    clock.now += 0.02
    assert turns.jobs_may_run and tree.locked == ["gone"], "its lease is another matter"
    batch(turns, leases, clock, seconds=0.1)
    assert turns.jobs_may_run, "it is waited for once"


def test_a_request_that_was_seen_in_a_batch_alone_has_come(clock: Clock):
    """One whose grammar was compiled does not wait in the queue."""
    leases = Leases(tree := Tree())
    leases.take("a", "a", prefix("a"), 10.0, "kept of a")
    leases.take("b", "b", prefix("b"), 10.0)
    leases.arrived([*asked("a"), Asked(None, array("q", list(b"b")))])
    assert list(leases.kept_for(*asked("a"))) == ["kept of a"] and list(leases.kept_for(*asked("b"))) == []
    leases.tick([])
    assert tree.locked == ["b"] and list(leases.kept_for(*asked("a"))) == []


@pytest.mark.parametrize("tokens", [b"prefiy+", b"refix+", b"prefi", b""])
def test_a_lease_is_for_what_continues_its_prefix_alone(tokens: bytes):
    def asks(namespace: str | None, prompt: bytes) -> Asked:
        return Asked(namespace, array("q", list(prompt)))

    leased = prefix("prefix")
    assert leased.is_for(asks("lifted", b"prefix")) and leased.is_for(asks("lifted", b"prefix+"))
    assert not leased.is_for(asks("lifted", tokens))
    assert not leased.is_for(asks("other", b"prefix+")) and not leased.is_for(asks(None, b"prefix+"))
