"""The tiers: who serves a model, where it is, or how it is started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, StrictFloat, StrictInt, StrictStr, field_validator, model_validator

from router.config.base import Name, Section
from router.errors import ConfigError
from router.locate import resolve
from router.yaml_source import fault_at

_Word = StrictStr | StrictInt | StrictFloat
Argument = _Word | Literal[True] | list[_Word]

_SET_BY_UP = frozenset({"model", "model-path", "host", "port", "served-model-name", "pack", "api-key"})


class Start(Section):
    """How `kvlift up` starts a worker: `kvlift worker --model ... --pack ... --KEY VALUE`."""

    model: str
    """A folder or a name that SGLang can load; `family:NAME` is a model that ships with kvlift."""
    packs: list[str] = []
    """Folders of packs to load; `family-pack:NAME` is one that ships with kvlift."""
    args: dict[str, Argument] = {}
    """Further options of `kvlift worker` and of SGLang: `key: true` becomes `--key`, a list `--key a b`."""

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


class _Reach(Section):
    """Where one worker is. `address` names a running one; `start` says how `kvlift up` starts it."""

    address: str | None = Field(default=None, pattern=r"^https?://[^/\s]+$")
    """Of a running worker: http://HOST:PORT, without a path."""
    start: Start | None = None
    """How `kvlift up` starts the worker, in place of an address."""
    api_key_env: str | None = None
    """The environment variable that holds the worker's key. Without one a worker is called without a key."""
    gateway: bool = False
    """The address is a balancer's, such as SGLang's own. The worker that holds a prompt's KV cannot be named then, so
    that nothing is lifted from it or to it.
    """

    def _refuse_two_ways(self) -> None:
        if (self.address is None) == (self.start is None):
            raise ValueError("give either 'address' (a running worker) or 'start' (how to start one)")
        if self.gateway and self.start is not None:
            raise fault_at(("gateway",), "kvlift up starts workers; give the 'address' of a running gateway")


class Replica(_Reach):
    """One of the workers of a tier."""

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Replica:
        self._refuse_two_ways()
        return self

    def api_key(self) -> str | None:
        """The worker's key. Raises `ConfigError` where the named variable is unset or empty."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "")
        if not key:
            raise ConfigError(f"environment variable {self.api_key_env} is not set; export the worker's key")
        return key


class Tier(_Reach):
    """A model, served by one worker (`address` or `start`) or by several alike (`replicas`)."""

    name: Name
    """What clients, policies and lift.pairs call the tier."""
    served: Name
    """The model name that the workers serve."""
    replicas: list[Replica] = []
    """Several workers that serve the same, in place of the one described here."""
    context_length: int | None = Field(default=None, ge=1)
    """Tokens; unset: what the workers themselves report."""

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> Tier:
        if not self.replicas:
            self._refuse_two_ways()
        elif moved := next((key for key in _Reach.model_fields if key in self.model_fields_set), None):
            raise fault_at((moved,), "belongs to each of the replicas; move it there")
        return self

    def workers(self) -> tuple[Replica, ...]:
        """The replicas; of a tier that was written without the word, the one that it describes."""
        only = {key: getattr(self, key) for key in _Reach.model_fields}
        return tuple(self.replicas) or (Replica.model_construct(**only),)

    def worker_name(self, index: int) -> str:
        """The name of one worker in logs, metrics and messages: the tier's, and the replica's number where it has any.

        `#` is in no tier's name, so that two workers never share one.
        """
        return f"{self.name}#{index}" if self.replicas else self.name

    def at(self, addresses: Sequence[str | None]) -> Tier:
        """The same tier with the address of each worker, in order; None leaves one as it is."""
        if not self.replicas:
            return self.model_copy(update={"address": addresses[0] or self.address})
        pairs = zip(self.replicas, addresses, strict=True)
        replicas = [r.model_copy(update={"address": address or r.address}) for r, address in pairs]
        return self.model_copy(update={"replicas": replicas})
