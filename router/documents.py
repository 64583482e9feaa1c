"""`/v1/documents` before all workers: a document is added, shown and deleted at every worker of the tiers meant.

Its id is a digest of its content, so that it is the same at each of them. In chat requests documents are the workers'
own business: the parts are passed on as they came.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, urlencode

from fastapi import APIRouter, Request

from router import schema
from router.access import Tenant
from router.errors import DOCUMENT_NOT_FOUND, RequestError, UpstreamError
from router.gateway import Gateway
from router.request import json_object
from router.worker import Worker

PATH = "/v1/documents"

Told = dict[str, Any]


class Documents:
    """Asks the workers of one config."""

    def __init__(self, workers: Sequence[Worker], timeout_s: float) -> None:
        """timeout_s: for one worker's answer."""
        self._workers = workers
        self._timeout_s = timeout_s

    async def add(self, raw: bytes, tenant: Tenant) -> Told:
        """Adds a document at the tier that the body names, at all of them by default.

        The answer is the first worker's, and in `kvlift` what each one said. Raises `ApiError` where none took it.
        """
        body = json_object(raw)
        workers = self._of(body.pop("tier", None))
        told, failed = await self._ask(workers, "POST", PATH, json.dumps(tenant.salted(body)).encode())
        if not told:
            raise next(iter(failed.values()))
        first = next(iter(told.values()))
        said = {name: {key: one[key] for key in ("id", "bytes", "ms")} for name, one in told.items()}
        errors = {name: {"error": str(error)} for name, error in failed.items()}
        return {**{key: value for key, value in first.items() if key not in ("bytes", "ms")}, "kvlift": said | errors}

    async def list(self, query: Mapping[str, str], tenant: Tenant) -> Told:
        """The tenant's documents at any worker, the oldest first; `kvlift.workers` names those that have it."""
        told, failed = await self._ask(self._of(query.get("tier")), "GET", _path("", query, tenant))
        if not told and failed:
            raise next(iter(failed.values()))
        found: dict[str, Told] = {}
        for name, listing in told.items():
            for one in listing["data"]:
                entry = found.setdefault(one["id"], {**one, "kvlift": {"workers": []}})
                entry["kvlift"]["workers"].append(name)
        return {"object": "list", "data": sorted(found.values(), key=lambda one: (one["created"], one["id"]))}

    async def show(self, document: str, query: Mapping[str, str], tenant: Tenant) -> Told:
        """The document as the first worker that has it shows it. Raises `RequestError` 404 where none has."""
        return next(iter((await self._found(document, "GET", query, tenant)).values()))

    async def delete(self, document: str, query: Mapping[str, str], tenant: Tenant) -> Told:
        """Deletes it at every worker that has it. Raises `RequestError` 404 where none has."""
        told = await self._found(document, "DELETE", query, tenant)
        return {**next(iter(told.values())), "kvlift": {"workers": list(told)}}

    async def _found(self, document: str, method: str, query: Mapping[str, str], tenant: Tenant) -> Mapping[str, Told]:
        path = _path(f"/{quote(document, safe='')}", query, tenant)
        told, failed = await self._ask(self._of(query.get("tier")), method, path)
        trouble = [error for error in failed.values() if error.reason != "upstream_404"]
        if told:
            return told
        if trouble:
            raise trouble[0]
        raise RequestError(f"no document {document!r}", code=DOCUMENT_NOT_FOUND, param="id", status=404)

    def _of(self, tier: Any) -> Sequence[Worker]:
        """The workers of a tier, given by its name or that of its model; all where None."""
        if tier is None:
            return self._workers
        workers = [worker for worker in self._workers if tier in (worker.tier.name, worker.tier.served)]
        if not workers:
            names = ", ".join(dict.fromkeys(worker.tier.name for worker in self._workers))
            raise RequestError(f"no tier {tier!r}; tiers: {names}", code="invalid_value", param="tier")
        return workers

    async def _ask(
        self, workers: Sequence[Worker], method: str, path: str, content: bytes | None = None
    ) -> tuple[dict[str, Told], dict[str, UpstreamError]]:
        """What each worker answered, and how each other one failed, by its name."""
        calls: list[Awaitable[Told]] = [worker.documents(method, path, self._timeout_s, content) for worker in workers]
        told: dict[str, Told] = {}
        failed: dict[str, UpstreamError] = {}
        for worker, answer in zip(workers, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, UpstreamError):
                failed[worker.name] = answer
            elif isinstance(answer, BaseException):
                raise answer
            else:
                told[worker.name] = answer
        return told, failed


def routes(gateway: Gateway, read: Callable[[Request], Awaitable[bytes]]) -> APIRouter:
    """The routes of one gateway. read: a request's body, within its limit."""
    router = APIRouter()
    documents = Documents(gateway.workers, gateway.config.limits.attempt_s)
    may_fail = schema.refusals(400, 413, 429, 502, 503)

    @router.post(PATH, responses=may_fail, openapi_extra=schema.document(gateway.routes.tiers))
    async def add(request: Request) -> Told:
        """Compiles a document at the workers, and answers with its id: the same for the same content."""
        tenant = gateway.admit(request.headers)
        return await documents.add(await read(request), tenant)

    @router.get(PATH, responses=schema.refusals(400, 502))
    async def listing(request: Request) -> Told:
        """Lists the documents that the workers have."""
        return await documents.list(request.query_params, gateway.access.tenant(request.headers))

    @router.get(PATH + "/{document}", responses=schema.refusals(400, 502))
    async def show(document: str, request: Request) -> Told:
        """Shows one document, with its text."""
        return await documents.show(document, request.query_params, gateway.access.tenant(request.headers))

    @router.delete(PATH + "/{document}", responses=schema.refusals(400, 502))
    async def delete(document: str, request: Request) -> Told:
        """Deletes a document at the workers."""
        return await documents.delete(document, request.query_params, gateway.access.tenant(request.headers))

    return router


def _path(rest: str, query: Mapping[str, str], tenant: Tenant) -> str:
    salt = tenant.salted({"cache_salt": query.get("cache_salt")})["cache_salt"]
    return PATH + rest + ("" if salt is None else "?" + urlencode({"cache_salt": salt}))
