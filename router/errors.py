"""Everything that the router raises on purpose.

KVLiftError                 the root, in sglang_ext.errors: what goes wrong with KV hangs there too
  ConfigError               the YAML file, or a name in it; names file, line and key
  SuperviseError            a worker process that cannot be started or kept
  ApiError                  ends as an OpenAI error JSON with an HTTP status
    RequestError            the client's fault: 400, or 404, 413
    Unavailable             not now: 503
    UpstreamError           a worker did not answer as it should; `reason` says how, in one word
      UpstreamRefused       no connection
      UpstreamStatus        an HTTP status other than 200
      UpstreamTimeout       one of the limits was reached
      UpstreamBroken        the answer is cut, malformed, or carries an error
"""

from __future__ import annotations

import re
from typing import Any

from sglang_ext.errors import KVLiftError


class ConfigError(KVLiftError):
    """The configuration cannot be used."""


class SuperviseError(KVLiftError):
    """A worker process cannot be started or kept."""


class ApiError(KVLiftError):
    """An error that a client is shown. `code` is a fixed word, `param` the body key at fault."""

    status = 500
    type = "internal_error"

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON."""
        error = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


class RequestError(ApiError):
    """The request cannot be served as it is."""

    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status


class Unavailable(ApiError):
    """The request is fine and cannot be served now."""

    status = 503
    type = "service_unavailable"


class UpstreamError(ApiError):
    """A worker did not answer as it should.

    `reason` is one word for headers and labels. `transient`: the same call may succeed if repeated, and
    nothing of its answer has been seen. `escalates`: the next tier may be able to answer.
    """

    status = 502
    type = "upstream_error"
    transient = False
    escalates = True

    def __init__(self, tier: str, reason: str, message: str) -> None:
        super().__init__(f"worker {tier!r}: {message}", code=reason)
        self.tier = tier
        self.reason = reason


class UpstreamRefused(UpstreamError):
    """No connection to the worker."""

    transient = True

    def __init__(self, tier: str, message: str) -> None:
        super().__init__(tier, "connect_failed", message)


class UpstreamTimeout(UpstreamError):
    """A limit of the config was reached; `limit` is its key under `limits`."""

    status = 504
    type = "upstream_timeout"

    def __init__(self, tier: str, limit: str, seconds: float) -> None:
        super().__init__(tier, f"{limit.removesuffix('_s')}_timeout", f"limits.{limit} of {seconds:g} s reached")


class UpstreamBroken(UpstreamError):
    """The answer is cut, malformed, or carries an error."""


_CONTEXT_LENGTH = re.compile(r"context[ _-]?(length|window)|maximum context", re.IGNORECASE)
_CLIENT_FAULTS = frozenset({400, 413, 422})
_TRANSIENT = frozenset({429, 502, 503})


class UpstreamStatus(UpstreamError):
    """The worker answered with an HTTP status other than 200, or with an error event in place of an answer.

    A 400, 413 or 422 is the client's and is handed on as the worker wrote it; the next tier is asked only
    where the worker said that the prompt is too long for it. Every other status is the worker's trouble.
    """

    def __init__(self, tier: str, status: int, answer: Any) -> None:
        message, self._answer = _worker_message(answer)
        too_long = status in _CLIENT_FAULTS and _CONTEXT_LENGTH.search(message) is not None
        super().__init__(tier, "context_length" if too_long else f"upstream_{status}", f"HTTP {status}: {message}")
        self.transient = status in _TRANSIENT
        self.escalates = too_long or status not in _CLIENT_FAULTS
        if status in _CLIENT_FAULTS:
            self.status = status
            self.type = "invalid_request_error"
        elif status in (429, 503):
            self.status = status
        self._handed_on = status in _CLIENT_FAULTS

    def body(self) -> dict[str, Any]:
        return {"error": self._answer} if self._handed_on and self._answer else super().body()


def _worker_message(answer: Any) -> tuple[str, dict[str, Any]]:
    """The message in a worker's error, and the error object; workers nest it under `error` or not."""
    if isinstance(answer, dict):
        error = answer.get("error", answer)
        if isinstance(error, dict):
            return str(error.get("message", error)), error
        return str(error), {"message": str(error), "type": "upstream_error", "param": None, "code": None}
    return str(answer)[:500] or "no body", {}
