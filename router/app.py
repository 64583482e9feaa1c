"""The HTTP surface: OpenAI's chat completions and completions, the model list, health and readiness."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from router import documents, page, schema
from router.chat import ChatRequest
from router.completion import CompletionRequest
from router.config import Config
from router.errors import ApiError, RequestError
from router.gateway import Gateway
from router.request import Request as AnswerRequest
from router.telemetry.routes import routes as telemetry_routes


def create_app(config: Config) -> FastAPI:
    """The application for a config whose tiers all have addresses. `app.state.gateway` is its `Gateway`.

    Raises `ConfigError`.
    """
    gateway = Gateway(config)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with gateway:
            yield

    app = FastAPI(title="kvlift", lifespan=lifespan, responses=schema.refusals(401, 404))
    app.state.gateway = gateway

    def check_key(request: Request) -> None:
        gateway.access.tenant(request.headers)

    needs_key = Depends(check_key)
    app.include_router(page.routes())
    app.include_router(telemetry_routes(gateway), dependencies=[needs_key])

    async def read(request: Request) -> bytes:
        return await _read_body(request, config.limits.max_body_bytes)

    app.include_router(documents.routes(gateway, read))

    async def reply(kind: type[AnswerRequest], request: Request) -> Response:
        tenant = gateway.admit(request.headers)
        return gateway.reply(kind, await read(request), tenant, request.headers)

    may_fail = schema.refusals(400, 413, 429, 502, 503, 504)
    names = gateway.routes.names

    @app.post(ChatRequest.path, response_class=Response, responses=may_fail, openapi_extra=schema.chat(names))
    async def chat(request: Request) -> Response:
        """Answers a chat request, streamed or not."""
        return await reply(ChatRequest, request)

    @app.post(
        CompletionRequest.path, response_class=Response, responses=may_fail, openapi_extra=schema.completion(names)
    )
    async def complete(request: Request) -> Response:
        """Continues a prompt, streamed or not."""
        return await reply(CompletionRequest, request)

    @app.get("/v1/models", dependencies=[needs_key])
    async def models() -> dict[str, object]:
        """Lists what `model` may be: policies and tiers."""
        return {"object": "list", "data": gateway.routes.listing()}

    @app.get("/v1/models/{name:path}", dependencies=[needs_key])
    async def model(name: str) -> dict[str, object]:
        """Describes one of them."""
        return gateway.routes.model(name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Says that the router runs, whatever its workers do."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"description": "a tier has no worker that is up, or the router is draining"}})
    async def ready(request: Request) -> Response:
        """200 while every tier has a worker that is up and requests are taken, else 503. Details need a key."""
        readiness = gateway.readiness()
        status = 200 if readiness["ready"] else 503
        if not gateway.access.knows(request.headers):
            readiness = {"ready": readiness["ready"], "draining": readiness["draining"]}
        return JSONResponse(readiness, status_code=status)

    @app.exception_handler(ApiError)
    async def show(_: Request, error: ApiError) -> Response:
        gateway.observer.refused(error)
        return JSONResponse(error.body(), status_code=error.status, headers=error.headers())

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
