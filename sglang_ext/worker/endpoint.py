"""Handlers as endpoints of SGLang's HTTP server: behind its API keys, traced, with errors as OpenAI's JSON."""

from __future__ import annotations

import asyncio
from typing import Any, Awaitable, Callable

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sglang.srt.utils.auth import AuthLevel, auth_level
from starlette.types import Receive

from sglang_ext.errors import KVLiftError, UnknownDocument
from sglang_ext.worker import spans


def guarded(handler: Callable[[Request], Any], level: AuthLevel = AuthLevel.ADMIN_OPTIONAL) -> Callable[[Request], Any]:
    """The handler as an endpoint.

    level: by default SGLang's admin key where one is set, else its API key; `NORMAL`: the API key in any case.
    """

    async def endpoint(request: Request) -> Any:
        try:
            with spans.serving(request):
                return await handler(request)
        except Exception as error:
            return refusal(error)

    return auth_level(level)(endpoint)


def while_connected(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """The handler, cancelled when its client hangs up. It must free what it holds when it is cancelled."""

    async def watched(request: Request) -> Any:
        await request.body()
        try:
            return await unless_hung_up(handler(request), request.receive)
        except HungUp:
            return _error(499, "the client hung up", None)

    return watched


class HungUp(Exception):
    """The client did not wait for the answer."""


async def unless_hung_up(handling: Awaitable[Any], receive: Receive) -> Any:
    """What it results in; cancelled, and HungUp raised, where the client goes first.

    receive: of a request whose body was read whole, so that all that can come now is the hang-up.
    """
    work, leaving = asyncio.ensure_future(handling), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
        hung_up = not work.done()
    finally:
        leaving.cancel()
        work.cancel()
    if hung_up:
        await asyncio.gather(work, return_exceptions=True)
        raise HungUp
    return await work


def refusal(error: Exception) -> JSONResponse:
    """The answer to a request that ended in `error`. Bad input is a 400. Raises an error that nobody foresaw."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _error(400, f"{where}: {first['msg']}" if where else first["msg"], where or None)
    if isinstance(error, UnknownDocument):
        return _error(404, str(error), None, "document_not_found")
    if isinstance(error, ValueError | KVLiftError):
        return _error(400, str(error), None)
    if isinstance(error, TimeoutError):
        return _error(504, "the scheduler did not answer in time", None)
    raise error


def _error(status: int, message: str, param: str | None, code: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code or status}
    return JSONResponse({"error": error}, status_code=status)
