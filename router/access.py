"""Which tenant a request comes from, told by its API key.

The tenant is folded into the cache salt of everything that workers are sent, so that no KV crosses tenants. Keys are
held as SHA-256 digests; they are logged and shown nowhere, and a worker never sees one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.config import Auth
from router.errors import ConfigError, RequestError, Unauthorised
from sglang_ext.identity import digest_fields


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks. `max_in_flight`: how many of its requests may be here at once, None: as many as the router takes."""

    name: str
    max_in_flight: int | None = None

    def salted(self, body: dict[str, Any]) -> dict[str, Any]:
        """The body with the tenant folded into its salt. Raises `RequestError` where the salt is not a string."""
        salt = body.get("cache_salt")
        if not isinstance(salt, str | None):
            raise RequestError("cache_salt is not a string", code="invalid_type", param="cache_salt")
        try:
            folded = digest_fields([self.name] if salt is None else [self.name, salt])
        except UnicodeEncodeError as error:
            raise RequestError("cache_salt is not Unicode text", code="invalid_value", param="cache_salt") from error
        return {**body, "cache_salt": folded}


class Anyone(Tenant):
    """Whoever can connect, where the config has no keys: its salt is sent as it is."""

    def salted(self, body: dict[str, Any]) -> dict[str, Any]:
        return body


class Access:
    """The keys of one config."""

    def __init__(self, auth: Auth) -> None:
        """Raises `ConfigError` where a key is not set, or two tenants share one."""
        self._tenants: dict[bytes, Tenant] = {}
        for key in auth.keys:
            tenant = Tenant(key.tenant, key.max_in_flight)
            if (other := self._tenants.setdefault(key.digest(), tenant)).name != tenant.name:
                raise ConfigError(f"auth.keys: tenants {other.name!r} and {tenant.name!r} have the same key")

    @property
    def is_open(self) -> bool:
        """Whether there are no keys."""
        return not self._tenants

    def knows(self, headers: Mapping[str, str]) -> bool:
        """Whether a key is not needed, or is a right one."""
        try:
            self.tenant(headers)
        except Unauthorised:
            return False
        return True

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """The owner of the key in `Authorization: Bearer` or `x-api-key`. Raises `Unauthorised`.

        `headers` has lower-case names. The time this takes does not depend on which key is close to the given one.
        """
        if self.is_open:
            return Anyone("")
        given = _key_in(headers)
        if given is None:
            raise Unauthorised("no API key: send 'Authorization: Bearer KEY' or 'x-api-key: KEY'")
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, digest)]
        if not found:
            raise Unauthorised("the API key is not known here")
        return found[0]


def _key_in(headers: Mapping[str, str]) -> str | None:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    return headers.get("x-api-key") or None
