"""The HTTP surface: OpenAI's chat completions, the model list, health and readiness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from router.config import Config
from router.errors import ApiError, RequestError
from router.gateway import Gateway


def create_app(config: Config) -> FastAPI:
    """The application for a config whose tiers all have addresses. `app.state.gateway` is its `Gateway`.

    Raises `ConfigError`.
    """
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway:
            yield

    app = FastAPI(title="kvlift", lifespan=lifespan)
    app.state.gateway = gateway

    @app.post("/v1/chat/completions", response_class=Response)
    async def chat(request: Request) -> Response:
        """Answers a chat request, streamed or not."""
        return gateway.chat(await _read_body(request, config.limits.max_body_bytes))

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        """Lists what `model` may be: policies and tiers."""
        return {"object": "list", "data": gateway.routes.listing()}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Says that the router runs, whatever its workers do."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        """200 while every worker is up and requests are taken, else 503."""
        readiness = gateway.readiness()
        return JSONResponse(readiness, status_code=200 if readiness["ready"] else 503)

    @app.exception_handler(ApiError)
    async def show(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body(), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def show_http(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {error.detail}; see /docs"
        body = RequestError(message, code="not_found").body()
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    return app


async def _read_body(request: Request, limit: int) -> bytes:
    """The body. Raises `RequestError` 413, for a declared length before anything is read."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return b"".join(parts)


def _too_large(limit: int) -> RequestError:
    return RequestError(
        f"the body is larger than limits.max_body_bytes, {limit} bytes", code="body_too_large", status=413
    )
