"""Kept-alive connections to one worker, taken and given back without a search.

httpcore's pool looks at all of its connections whenever a request begins or ends, and at all of them again for each
that is idle: with a thousand streams that is most of the router's work. Here each connection is a pool of its own, of
one, and those that are idle lie on a stack.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator
from ssl import PROTOCOL_TLS_CLIENT, SSLContext

import httpx


class Connections(httpx.AsyncBaseTransport):
    """A transport: as many connections as there are requests at once; the one that was used last is used next."""

    def __init__(self, keep_idle_s: float, *, encrypted: bool) -> None:
        """One that was idle for `keep_idle_s` is not used again. `encrypted`: whether the worker's address is https."""
        self._keep_idle_s = keep_idle_s
        # Made once, because the certificates of all authorities take time to read.
        self._tls = httpx.create_ssl_context(trust_env=False) if encrypted else SSLContext(PROTOCOL_TLS_CLIENT)
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()  # since when; the newest is the last

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await self._drop_old()
        connection = self._idle.pop()[1] if self._idle else self._new()
        response = await connection.handle_async_request(request)  # where this raises, httpcore has closed it
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, connection, self)
        return response

    async def aclose(self) -> None:
        while self._idle:
            await self._idle.pop()[1].aclose()

    def give_back(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Its request has ended. Where the answer was not read to its end, the next request connects anew."""
        self._idle.append((time.monotonic(), connection))

    def _new(self) -> httpx.AsyncHTTPTransport:
        one = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=self._keep_idle_s)
        return httpx.AsyncHTTPTransport(verify=self._tls, limits=one, trust_env=False)

    async def _drop_old(self) -> None:
        while self._idle and time.monotonic() - self._idle[0][0] > self._keep_idle_s:
            await self._idle.popleft()[1].aclose()


class _Body(httpx.AsyncByteStream):
    """An answer's body, which gives its connection back when it is closed."""

    def __init__(
        self, stream: httpx.AsyncByteStream, connection: httpx.AsyncHTTPTransport, connections: Connections
    ) -> None:
        self._stream = stream
        self._connection = connection
        self._connections = connections
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        await self._stream.aclose()
        self._connections.give_back(self._connection)
