"""The systems that are compared, by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from loadtest.client import Client
from loadtest.errors import BadSystem
from loadtest.run import LARGE
from loadtest.servers import Servers, Worker
from loadtest.systems import Chat, LiftThenChat, System
from router.config import ALIAS

SMALL, AUTOMATIC, CASCADE = "small", "automatic", "cascade"
PAPER_LIFT = "lift-0.3"
"""The system of the paper's table 4."""

PAPER = (LARGE, "lift-0.2", PAPER_LIFT, "lift-0.5", AUTOMATIC, CASCADE, SMALL)
"""All systems of the paper's comparison and ours, in the order of a report."""

KNOWN = "large, lift-RHO (as in lift-0.3), automatic, cascade or small"
_LIFT = re.compile(r"lift-(0(?:\.\d+)?|1(?:\.0+)?)")
CALL_TIMEOUT_S = 600.0
"""Of one call, its time in the queue included: the longest that a worker may be asked to take for a lift."""


@dataclass(frozen=True, slots=True)
class Entry:
    """`source`: what the source must hold of the prompts before a load; None where it does not matter.

    `counts`: the worker whose batches are this system's.
    """

    system: System
    source: Literal["prefilled", "empty"] | None
    counts: Worker

    @property
    def name(self) -> str:
        return self.system.name


def rho_of(name: str) -> float | None:
    """The budget of a system that always lifts; None for the others. Raises `BadSystem` for a name that is none."""
    if name in (LARGE, SMALL, AUTOMATIC, CASCADE):
        return None
    match = _LIFT.fullmatch(name)
    if match is None:
        raise BadSystem(f"no system {name!r}; expected {KNOWN}")
    return float(match[1])


def in_order(names: set[str]) -> list[str]:
    """As a report lists them: large, lifts by budget, automatic, cascade, small."""
    last = (AUTOMATIC, CASCADE, SMALL)
    return sorted(names, key=lambda name: (name != LARGE, last.index(name) if name in last else -1, rho_of(name) or 0))


def entry(name: str, servers: Servers) -> Entry:
    """Raises `BadSystem` for an unknown name, or where a server that it needs was not given."""
    rho = rho_of(name)
    target = servers.target
    if name == LARGE:
        return Entry(_chat(name, target), None, target)
    if name == CASCADE:
        if servers.router_url is None:
            raise BadSystem(f"{name} needs a router (--router)")
        return Entry(Chat(name, Client(servers.router_url, CALL_TIMEOUT_S), ALIAS), "empty", target)
    if servers.source is None:
        raise BadSystem(f"{name} needs a source worker (--source)")
    if name == SMALL:
        return Entry(_chat(name, servers.source), "empty", servers.source)
    when: Literal["faster", "always"] = "faster" if name == AUTOMATIC else "always"
    system = LiftThenChat(_chat(name, target), servers.source.url, rho=rho, when=when, lift_timeout_s=CALL_TIMEOUT_S)
    return Entry(system, "prefilled", target)


def _chat(name: str, worker: Worker) -> Chat:
    return Chat(name, Client(worker.url, CALL_TIMEOUT_S), worker.served.model)
