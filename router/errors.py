"""Everything that the router raises on purpose.

KVLiftError                 the root, in sglang_ext.errors: what goes wrong with KV hangs there too
  ConfigError               the YAML file, or a name in it; names file, line and key
  SuperviseError            a worker process that cannot be started or kept
  ApiError                  ends as an OpenAI error JSON with an HTTP status
    RequestError            the client's fault: 400, or 404, 413
    Unauthorised            no key, or a wrong one: 401
    Unavailable             not now: 503
      Busy                  too many requests: 429
    UpstreamError           a worker did not answer as it should; `reason` says how, in one word
      UpstreamRefused       no connection
      UpstreamStatus        an HTTP status other than 200
      UpstreamTimeout       one of the limits was reached
      UpstreamBroken        the answer is cut, malformed, or carries an error
"""

from __future__ import annotations

import math
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

    def headers(self) -> dict[str, str]:
        """What goes along with the status."""
        return {}


class RequestError(ApiError):
    """The request cannot be served as it is."""

    type = "invalid_request_error"

    def __init__(self, message: str, *, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status


class Unauthorised(ApiError):
    """The client did not say who it is. The message never repeats what it said instead."""

    status = 401
    type = "invalid_request_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, code="invalid_api_key")

    def headers(self) -> dict[str, str]:
        return {"www-authenticate": "Bearer"}


class Unavailable(ApiError):
    """The request is fine and cannot be served now; `retry_after_s` is when it may be, where that is known."""

    status = 503
    type = "service_unavailable"

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code)
        self._retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        if self._retry_after_s is None:
            return {}
        return {"retry-after": str(max(math.ceil(self._retry_after_s), 1))}  # whole seconds, as HTTP has it


class Busy(Unavailable):
    """There are too many requests now."""

    status = 429
    type = "rate_limit_error"


class UpstreamError(ApiError):
    """A worker did not answer as it should.

    `reason` is one word for headers and labels. `transient`: the same call may succeed if repeated, and
    nothing of its answer has been seen. `escalates`: the next tier may be able to answer. `blames`: it counts
    against the worker's breaker.
    """

    status = 502
    type = "upstream_error"
    transient = False
    escalates = True
    blames = True

    def __init__(self, worker: str, reason: str, message: str) -> None:
        super().__init__(f"worker {worker!r}: {message}", code=reason)
        self.reason = reason


class UpstreamRefused(UpstreamError):
    """No connection to the worker."""

    transient = True

    def __init__(self, worker: str, message: str) -> None:
        super().__init__(worker, "connect_failed", message)


class UpstreamTimeout(UpstreamError):
    """A limit of the config was reached; `limit` is its key under `limits`."""

    status = 504
    type = "upstream_timeout"

    def __init__(self, worker: str, limit: str, seconds: float) -> None:
        super().__init__(worker, f"{limit.removesuffix('_s')}_timeout", f"limits.{limit} of {seconds:g} s reached")
        self.blames = limit != "total_s"  # which other workers have used up too


class UpstreamBroken(UpstreamError):
    """The answer is cut, malformed, or carries an error."""


_CONTEXT_LENGTH = re.compile(r"context[ _-]?(length|window)|maximum context", re.IGNORECASE)
_CLIENT_FAULTS = frozenset({400, 413, 422})
_TRANSIENT = frozenset({429, 502, 503})
DOCUMENT_NOT_FOUND = "document_not_found"
"""The code of an error about an id that names no document of the client's."""


class UpstreamStatus(UpstreamError):
    """The worker answered with an HTTP status other than 200, or with an error event in place of an answer.

    A 400, 413 or 422 is the client's, and so is a document that the worker does not know: it is handed on as the
    worker wrote it; the next tier is asked only where the worker said that the prompt is too long for it. Every other
    status is the worker's trouble.
    """

    def __init__(self, worker: str, status: int, answer: Any) -> None:
        message, self._answer = _worker_message(answer)
        of_client = status in _CLIENT_FAULTS or (status, self._answer.get("code")) == (404, DOCUMENT_NOT_FOUND)
        too_long = of_client and _CONTEXT_LENGTH.search(message) is not None
        super().__init__(worker, "context_length" if too_long else f"upstream_{status}", f"HTTP {status}: {message}")
        self.transient = status in _TRANSIENT
        self.escalates = too_long or not of_client
        self.blames = status >= 500
        if of_client:
            self.status = status
            self.type = "invalid_request_error"
        elif status in (429, 503):
            self.status = status
        self._handed_on = of_client

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
