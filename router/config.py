"""The router's configuration: one YAML file, read into these models. Seconds and bytes unless said otherwise.

`load_config(path)` is the way in; every model forbids keys that it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    StringConstraints,
    field_validator,
    model_validator,
)

from policies import AnyPolicy
from router.errors import ConfigError
from router.locate import resolve
from router.yaml_source import fault_at, load

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]*$", max_length=128)]
Seconds = Annotated[float, Field(gt=0, le=86400)]
_Word = StrictStr | StrictInt | StrictFloat
Place = tuple[str | int, ...]
Argument = _Word | Literal[True] | list[_Word]
Selector = Annotated[str, StringConstraints(pattern=r"^(rank_disagreement|source_attention|random(:\d+)?)$")]
"""What a worker can score tokens by (sglang_ext/transfer/selectors.py, which imports torch)."""

ALIAS = "kvlift"
"""The `model` name that stands for the default policy."""

_TIER_KEYS = frozenset({"tier", "to"})  # of policies
_SET_BY_UP = frozenset({"model", "model-path", "host", "port", "served-model-name", "pack", "api-key"})


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Listen(Section):
    """Where clients connect. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)


class Start(Section):
    """How `kvlift up` starts a tier's worker: `kvlift worker --model ... --pack ... --KEY VALUE`."""

    model: str
    packs: list[str] = []
    args: dict[str, Argument] = {}  # `key: true` becomes `--key`, a list `--key a b`

    @field_validator("model")
    @classmethod
    def _locate_model(cls, model: str) -> str:
        return _located(model)

    @field_validator("packs")
    @classmethod
    def _locate_packs(cls, packs: list[str]) -> list[str]:
        return [_located(pack) for pack in packs]

    @field_validator("args")
    @classmethod
    def _leave_what_up_sets(cls, args: dict[str, Argument]) -> dict[str, Argument]:
        for key in args:
            if key.startswith("-"):
                raise fault_at((key,), f"write {key!r} without its leading dashes")
            if key in _SET_BY_UP:
                raise fault_at((key,), "set by kvlift up; use the tier's own keys (model, packs, served, api_key_env)")
        return args

    def arguments(self) -> list[str]:
        """`args` as words of a command line."""
        words: list[str] = []
        for key, value in self.args.items():
            words.append(f"--{key}")
            if value is not True:
                words += [str(v) for v in value] if isinstance(value, list) else [str(value)]
        return words


def _located(name: str) -> str:
    try:
        return resolve(name)
    except ConfigError as error:
        raise ValueError(str(error)) from error


class Tier(Section):
    """One worker. `address` names a running one; `start` says how `kvlift up` starts it."""

    name: Name
    served: Name  # the model name that the worker serves
    address: str | None = Field(default=None, pattern=r"^https?://[^/\s]+$")
    start: Start | None = None
    api_key_env: str | None = None  # the environment variable that holds the worker's key
    context_length: int | None = Field(default=None, ge=1)  # tokens; unset: what the worker itself reports

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Tier:
        if (self.address is None) == (self.start is None):
            raise ValueError("give either 'address' (a running worker) or 'start' (how to start one)")
        return self

    def api_key(self) -> str | None:
        """The worker's key. Raises `ConfigError` where the named variable is unset or empty."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(
                f"tier {self.name!r}: environment variable {self.api_key_env} is not set; export the worker's key"
            )
        return key


class LiftPair(Section):
    """The pack (name or digest) that lifts from one tier to another."""

    source: Name
    target: Name
    pack: str


class Lift(Section):
    """The hand-over of the KV cache. A pair that is not listed is never lifted."""

    pairs: list[LiftPair] = []
    rho: float = Field(default=0.3, ge=0, le=1)  # share of the positions that the target recomputes
    coverage: float | None = Field(default=None, ge=0, le=1)  # instead of rho: share of the scores' sum
    selector: Selector = "rank_disagreement"
    when: Literal["faster", "always"] = "faster"  # by the target's own estimate, or in any case
    lease_s: Seconds = 10.0  # how long the worker holds the lifted KV for the chat request
    timeout_s: Seconds = 5.0

    @model_validator(mode="after")
    def _one_budget(self) -> Lift:
        if self.coverage is not None and "rho" in self.model_fields_set:
            raise ValueError("give either 'rho' or 'coverage'")
        return self


class Limits(Section):
    """What a request may cost. A streamed answer is bounded by first token and idle time, every one by the rest."""

    connect_s: Seconds = 2.0
    first_token_s: Seconds = 60.0  # streamed: from the call to the first content
    idle_s: Seconds = 30.0  # streamed: between two events after the first content
    attempt_s: Seconds = 120.0  # an attempt that may still be discarded
    total_s: Seconds = 600.0  # the whole request
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    retries: int = Field(default=0, ge=0, le=10)  # per worker, after no connection, 429, 502 or 503
    max_calls: int = Field(default=4, ge=1)  # chat calls to workers for one request, retries counted in
    max_shadow: int = Field(default=4, ge=1)  # shadow calls that run at once; what would be more is not asked

    def once(self) -> Limits:
        """The same without retries, for calls whose failure costs nobody an answer."""
        return self.model_copy(update={"retries": 0})


class Health(Section):
    """Probes of the workers. `misses` in a row mark a worker down, one success marks it up."""

    interval_s: Seconds = 2.0
    timeout_s: Seconds = 5.0  # generous: a worker in a long prefill answers late and is not down
    misses: int = Field(default=3, ge=1)


class Restart(Section):
    """What `kvlift up` does when a worker dies. The pause doubles from `backoff_s`, up to 30 s."""

    attempts: int = Field(default=5, ge=0)  # for one worker, over the life of `kvlift up`
    backoff_s: Seconds = 1.0
    stop_s: Seconds = 10.0  # from asking a worker to stop to killing it


class Config(Section):
    """The whole file. The order of `tiers` is the order of escalation."""

    listen: Listen = Listen()
    tiers: list[Tier] = Field(min_length=1)
    lift: Lift = Lift()
    policies: dict[Name, AnyPolicy]
    default_policy: Name
    limits: Limits = Limits()
    health: Health = Health()
    restart: Restart = Restart()
    drain_s: Seconds = 30.0  # after SIGTERM, for the answers in flight

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

    def _names(self) -> Iterator[tuple[str, Place]]:
        for policy in self.policies:
            yield policy, ("policies", policy)
        for index, tier in enumerate(self.tiers):
            yield tier.name, ("tiers", index, "name")
            yield tier.served, ("tiers", index, "served")

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
