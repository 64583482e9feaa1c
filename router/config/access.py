"""Who may connect: the address that is listened at, and the keys of the clients."""

from __future__ import annotations

import hashlib
import ipaddress
import os
from typing import Annotated

from pydantic import Field, StringConstraints, model_validator

from router.config.base import Name, Section
from router.errors import ConfigError
from router.yaml_source import fault_at


class Listen(Section):
    """Where clients connect."""

    host: str = "127.0.0.1"
    """An address of this machine. Anything but loopback needs auth.keys."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free one."""

    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name: only one is known to mean this machine
            return self.host == "localhost"


class ClientKey(Section):
    """One API key of a tenant, by the variable that holds it or by its SHA-256 in hexadecimal digits.

    A tenant may have several keys, to change them without a gap.
    """

    tenant: Name
    """Whose key it is. No KV is shared between tenants."""
    key_env: str | None = None
    """The environment variable that holds the key."""
    key_sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    """The key's SHA-256, in place of key_env."""
    max_in_flight: int | None = Field(default=None, ge=1)
    """Requests of the tenant that are served or wait at once, over all its keys; what would be more is refused with
    429. Unset: as many as the router takes.
    """

    @model_validator(mode="after")
    def _one_way_to_know_it(self) -> ClientKey:
        if (self.key_env is None) == (self.key_sha256 is None):
            raise ValueError("give either 'key_env' (a variable with the key) or 'key_sha256' (its digest)")
        return self

    def digest(self) -> bytes:
        """The key's SHA-256. Raises `ConfigError` where the named variable is unset or empty."""
        if self.key_sha256 is not None:
            return bytes.fromhex(self.key_sha256)
        key = os.environ.get(self.key_env or "", "")
        if not key:
            raise ConfigError(
                f"tenant {self.tenant!r}: environment variable {self.key_env} is not set; export the client's key"
            )
        return hashlib.sha256(key.encode()).digest()


class Auth(Section):
    """The clients. Without keys every client is served, and the router listens on this machine alone."""

    keys: list[ClientKey] = []
    """With any, every request needs one: `Authorization: Bearer KEY` or `x-api-key: KEY`."""

    @model_validator(mode="after")
    def _one_limit_per_tenant(self) -> Auth:
        first: dict[str, int | None] = {}
        for index, key in enumerate(self.keys):
            limit = first.setdefault(key.tenant, key.max_in_flight)
            if limit != key.max_in_flight:
                place = ("keys", index, "max_in_flight")
                raise fault_at(place, f"tenant {key.tenant!r} has another limit at an earlier key; give all the same")
        return self
