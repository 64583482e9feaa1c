"""The whole file, and what its parts must agree on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from policies import AnyPolicy
from router.config.access import Auth, Listen
from router.config.base import Name, Place, Seconds, Section
from router.config.lift import Lift
from router.config.limits import Breaker, Health, Limits, Restart
from router.config.telemetry import Telemetry
from router.config.tiers import Tier
from router.yaml_source import fault_at, load

ALIAS = "kvlift"
"""The `model` name that stands for the default policy."""

Escalation = Literal["restart", "continue"]
"""The next tier answers anew, or goes on with the answer that the last one has begun."""

_TIER_KEYS = frozenset({"tier", "to"})  # of policies


class Config(Section):
    """The whole file. The order of `tiers` is the order of escalation."""

    listen: Listen = Listen()
    """Where clients connect."""
    auth: Auth = Auth()
    """The keys of the clients."""
    tiers: list[Tier] = Field(min_length=1)
    """The models, in the order of escalation."""
    lift: Lift = Lift()
    """The hand-over of the KV cache between tiers."""
    policies: dict[Name, AnyPolicy]
    """When to escalate, by names that clients may choose from in `model`."""
    default_policy: Name
    """The policy of requests whose `model` is `kvlift`."""
    escalation: Escalation = "restart"
    """How the next tier goes on: `restart` answers anew; `continue` goes on with a streamed answer in plain text, and
    restarts any other, with a note.
    """
    sticky_s: float = Field(default=600.0, ge=0, le=86400)
    """How long a conversation stays on the tier that it escalated to, since its last answer; 0: not at all."""
    limits: Limits = Limits()
    """What a request may cost."""
    health: Health = Health()
    """Probes of the workers."""
    breaker: Breaker = Breaker()
    """What opens the circuit breaker of a worker."""
    restart: Restart = Restart()
    """What `kvlift up` does when a worker dies."""
    telemetry: Telemetry = Telemetry()
    """Spans and logs."""
    drain_s: Seconds = 30.0
    """After SIGTERM, for the requests that are here."""

    @model_validator(mode="after")
    def _names_mean_one_thing(self) -> Config:
        owners: dict[str, Place] = {}
        for name, place in self._names():
            if name == ALIAS:
                raise fault_at(place, f"the name {ALIAS!r} stands for the default policy; choose another")
            owner = owners.setdefault(name, place)
            if owner != place and owner[:2] != place[:2]:  # a tier may be named as the model that it serves
                where = ".".join(str(part) for part in owner)
                raise fault_at(place, f"the name {name!r} is taken by {where}; clients choose by name: rename one")
        return self

    @model_validator(mode="after")
    def _references_exist(self) -> Config:
        if self.default_policy not in self.policies:
            known = ", ".join(self.policies) or "none"
            raise fault_at(("default_policy",), f"no policy {self.default_policy!r} under policies; known: {known}")
        order = [tier.name for tier in self.tiers]
        for index, pair in enumerate(self.lift.pairs):
            place = ("lift", "pairs", index)
            for key, name in (("source", pair.source), ("target", pair.target)):
                if name not in order:
                    raise fault_at((*place, key), f"no tier {name!r}; tiers: {', '.join(order)}")
            if order.index(pair.source) >= order.index(pair.target):
                raise fault_at(place, f"{pair.source!r} must come before {pair.target!r} in tiers to lift to it")
        for title, policy in self.policies.items():
            for name in sorted(policy.tiers - set(order)):
                named = _where_named(name, policy.model_dump(), ("policies", title))
                raise fault_at(named or ("policies", title), f"no tier {name!r}; tiers: {', '.join(order)}")
        return self

    @model_validator(mode="after")
    def _lifts_name_workers(self) -> Config:
        behind = {tier.name for tier in self.tiers if all(worker.gateway for worker in tier.workers())}
        for index, pair in enumerate(self.lift.pairs):
            for key, name in (("source", pair.source), ("target", pair.target)):
                if name in behind:
                    raise fault_at(
                        ("lift", "pairs", index, key),
                        f"tier {name!r} stands behind a gateway, which does not say which worker holds the KV; "
                        "list its workers under 'replicas', or remove the pair",
                    )
        return self

    @model_validator(mode="after")
    def _wider_needs_keys(self) -> Config:
        if not self.listen.is_loopback() and not self.auth.keys:
            raise fault_at(
                ("listen", "host"),
                f"{self.listen.host!r} can be reached from other machines, and there are no keys; "
                "add auth.keys, or listen on 127.0.0.1",
            )
        return self

    def _names(self) -> Iterator[tuple[str, Place]]:
        for policy in self.policies:
            yield policy, ("policies", policy)
        for index, tier in enumerate(self.tiers):
            yield tier.name, ("tiers", index, "name")
            yield tier.served, ("tiers", index, "served")

    def require_secrets(self) -> None:
        """Raises `ConfigError` where an environment variable that holds a key is unset or empty."""
        for replica in (replica for tier in self.tiers for replica in tier.workers()):
            replica.api_key()
        for key in self.auth.keys:
            key.digest()

    def pack(self, source: str, target: str) -> str | None:
        """The pack that lifts from tier `source` to tier `target`."""
        return next((p.pack for p in self.lift.pairs if (p.source, p.target) == (source, target)), None)


def _where_named(tier: str, part: Any, place: Place) -> Place | None:
    """The place of the first key, in a dumped policy, that holds the tier's name."""
    children = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    for key, child in children:
        if child == tier and key in _TIER_KEYS:
            return (*place, key)
        if found := _where_named(tier, child, (*place, key)):
            return found
    return None


def load_config(path: Path) -> Config:
    """The configuration in the file. Raises `ConfigError`."""
    return load(path, Config)
