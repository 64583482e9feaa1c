"""One server over kept-alive connections: a streamed chat request, and a plain JSON call. For greenlets."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import gevent
from geventhttpclient import HTTPClient
from geventhttpclient.response import HTTPParseError, HTTPSocketPoolResponse
from pydantic import BaseModel, ValidationError

from loadtest.errors import BadTarget, CallFailed, TargetDown, Unreachable
from router.events import AnswerEvent, Malformed
from router.sse import DONE, SSEParser

_CONNECT_S = 5.0
_MOST_CONNECTIONS = 20_000  # an open loop has no limit of its own; the system's limit on open files comes first
_SHOWN = 300  # characters of a server's error


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. Times are of `time.perf_counter`; what the server did not tell is None."""

    first_token: float
    end: float
    tier: str | None = None
    escalated: bool | None = None
    lift: str | None = None
    lift_reason: str | None = None
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Client:
    """`timeout_s` bounds a whole call. A call whose kept connection the server closes meanwhile fails; none is
    repeated, because the server may have begun it."""

    def __init__(self, url: str, timeout_s: float = 300.0, api_key: str | None = None) -> None:
        """`url`: http or https, host, port, and a path where the server is mounted under one. Raises `BadTarget`."""
        self.url = url.rstrip("/")
        self._timeout_s = timeout_s
        parts = _split(url)
        self._path = parts.path.rstrip("/")
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if api_key:
            headers["authorization"] = f"Bearer {api_key}"
        self._http = HTTPClient(
            parts.hostname or "",
            parts.port,
            headers=headers,
            ssl=parts.scheme == "https",
            concurrency=_MOST_CONNECTIONS,
            connection_timeout=_CONNECT_S,
            network_timeout=timeout_s + _CONNECT_S,  # of one read: the bound on the whole call comes first
        )

    def check(self) -> None:
        """Raises `TargetDown` where the server does not answer HTTP."""
        try:
            with self._call("GET", "/v1/models", None) as response:
                response.read()
        except CallFailed as error:
            raise TargetDown(f"{error}; is the server running, and is this its address?") from error

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The JSON that the server answers. Raises `CallFailed`, also for a status other than 200."""
        with self._call("POST", path, body) as response:
            self._expect_ok(path, response)
            try:
                return json.loads(response.read())
            except ValueError as error:
                raise CallFailed(f"{path}: the answer is not JSON: {error}") from error

    def chat(self, body: Mapping[str, Any]) -> Answer:
        """Sends a chat request and reads its streamed answer to the end. `body` asks for streaming and usage.

        The first token is the first event with content, reasoning or a tool call; where an answer has none of them,
        the event that ends it. Raises `CallFailed` unless the answer is whole: a finish_reason and [DONE].
        """
        path = "/v1/chat/completions"
        with self._call("POST", path, body) as response:
            self._expect_ok(path, response)
            reader = _Reader()
            for data in _events(response):
                reader.take(data)
            return reader.answer(response)

    def close(self) -> None:
        """Closes the idle connections; a call that still runs closes its own."""
        self._http.close()

    @contextmanager
    def _call(self, method: str, path: str, body: Mapping[str, Any] | None) -> Iterator[HTTPSocketPoolResponse]:
        content = b"" if body is None else json.dumps(body).encode()
        late = CallFailed(f"timeout: no whole answer within {self._timeout_s:g} s")
        with gevent.Timeout(self._timeout_s, late):
            try:
                # A refused connection and a failed look-up of the host are OSErrors, and so is a reset one.
                response = self._http.request(method, self._path + path, content)
            except (ConnectionResetError, BrokenPipeError, HTTPParseError) as error:
                raise CallFailed(f"the connection to {self.url} broke before an answer: {error!r}") from error
            except OSError as error:
                raise Unreachable(f"no connection to {self.url}: {error}") from error
            try:
                yield response
            except (OSError, HTTPParseError) as error:
                raise CallFailed(f"the connection to {self.url} broke within the answer: {error!r}") from error
            finally:
                response.release()

    def _expect_ok(self, path: str, response: HTTPSocketPoolResponse) -> None:
        if response.status_code != 200:
            raise CallFailed(f"{path}: HTTP {response.status_code}: {_message(response.read())}")


class _Lift(BaseModel):
    status: str | None = None
    reason: str | None = None
    ms: dict[str, float] = {}


class _Told(BaseModel):
    """The parts of a last chunk that are recorded: the extension field `kvlift`, and the usage."""

    tier: str | None = None
    escalated: bool | None = None
    lift: _Lift | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Reader:
    """Takes the events of one answer as they come."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._end: float | None = None  # when [DONE] came
        self._finish: str | None = None
        self._usage: Mapping[str, Any] = {}
        self._extension: Mapping[str, Any] = {}

    def take(self, data: str) -> None:
        """The data of one event. Raises `CallFailed` for an error in an answer's place."""
        now = time.perf_counter()
        if data == DONE:
            self._end = now
            return
        try:
            event = AnswerEvent(data)
        except Malformed as error:
            raise CallFailed(f"a malformed event: {error}") from error
        if event.error is not None:
            raise CallFailed(f"an error event: {_message(data.encode())}")
        ends = event.finishes()
        if self._first is None and (ends or event.has_content()):
            self._first = now
        if ends:
            self._finish = next(iter(ends.values()))
        self._usage = event.usage or self._usage
        extension = event.body.get("kvlift")
        if isinstance(extension, dict):
            self._extension = extension

    def answer(self, response: HTTPSocketPoolResponse) -> Answer:
        """After the last event. Raises `CallFailed` where something is missing."""
        if self._first is None or self._finish is None:
            kind = response.get("content-type") or "none"
            raise CallFailed(f"the answer ended without a finish_reason (content-type: {kind})")
        if self._end is None:
            raise CallFailed("the answer ended without [DONE]")
        if self._finish == "abort":
            raise CallFailed("the server aborted the answer (finish_reason abort)")
        try:
            told = _Told.model_validate({**self._usage, **self._extension})
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            where = ".".join(map(str, fault["loc"]))
            raise CallFailed(f"usage or kvlift of the last chunk: {where}: {fault['msg']}") from error
        lift = told.lift or _Lift()
        # The headers leave before the answer does: the last chunk knows best.
        escalated = told.escalated
        if escalated is None and (header := _header(response, "x-kvlift-escalated")):
            escalated = header == "true"
        return Answer(
            first_token=self._first,
            end=self._end,
            tier=told.tier or _header(response, "x-kvlift-tier"),
            escalated=escalated,
            lift=lift.status or _header(response, "x-kvlift-lift"),
            lift_reason=lift.reason,
            phases_ms=lift.ms,
            prompt_tokens=told.prompt_tokens,
            completion_tokens=told.completion_tokens,
        )


def _events(response: HTTPSocketPoolResponse) -> Iterator[str]:
    """The data of each event, as soon as its last line is here."""
    parser = SSEParser()
    while line := response.readline(b"\n"):
        yield from parser.feed(line)
    yield from parser.feed(response.read())


def _header(response: HTTPSocketPoolResponse, name: str) -> str | None:
    value = response.get(name)
    return value if isinstance(value, str) and value else None


def _message(body: bytes) -> str:
    """What a server's error says; servers nest it under `error` or not."""
    text = body.decode(errors="replace").strip()
    try:
        told = json.loads(text)
    except (ValueError, RecursionError):
        return text[:_SHOWN] or "no body"
    if isinstance(told, dict):
        told = told.get("error", told)
    if isinstance(told, dict):
        told = told.get("message", told)
    return str(told)[:_SHOWN]


def _split(url: str) -> Any:
    parts = urlsplit(url)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:  # a port that is no number
        good = False
    if not good or parts.query or parts.fragment:
        raise BadTarget(f"address {url!r}; expected one like http://127.0.0.1:8000")
    return parts
