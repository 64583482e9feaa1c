"""Handlers as endpoints of SGLang's HTTP server: behind its API keys, with errors as OpenAI's JSON."""

from __future__ import annotations

from typing import Any, Callable

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from sglang.srt.utils.auth import AuthLevel, auth_level

from sglang_ext.errors import KVLiftError


def guarded(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
    """The handler behind SGLang's admin key where one is set, else its API key. Bad input becomes a 400."""

    async def endpoint(request: Request) -> Any:
        try:
            return await handler(request)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            return _error(400, f"{where}: {first['msg']}" if where else first["msg"], where or None)
        except (ValueError, KVLiftError) as error:
            return _error(400, str(error), None)
        except TimeoutError:
            return _error(504, "the scheduler did not answer in time", None)

    return auth_level(AuthLevel.ADMIN_OPTIONAL)(endpoint)


def _error(status: int, message: str, param: str | None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": param, "code": status}
    return JSONResponse({"error": error}, status_code=status)
