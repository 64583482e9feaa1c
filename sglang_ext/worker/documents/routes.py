"""`/v1/documents`: add, list, show and delete, behind the API key that chat requests need; `/kv/link`, `/kv/map`."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from sglang.srt.utils.auth import AuthLevel

from sglang_ext.documents.record import DocumentRecord
from sglang_ext.worker.answers import Answer
from sglang_ext.worker.documents.bodies import DocumentBody, LinkBody, MapBody
from sglang_ext.worker.documents.service import Documents
from sglang_ext.worker.endpoint import guarded, while_connected

PATH = "/v1/documents"


class DocumentRoutes:
    """The routes of one worker's documents. The tenant is the `cache_salt`, of the body or of the query."""

    def __init__(self, documents: Documents) -> None:
        self._documents = documents

    def mount(self, app: FastAPI) -> None:
        """Adds the routes."""
        for method, path, handler in (
            ("POST", PATH, self.add),
            ("GET", PATH, self.list),
            ("GET", PATH + "/{document}", self.show),
            ("DELETE", PATH + "/{document}", self.delete),
        ):
            endpoint = guarded(handler, AuthLevel.NORMAL)
            app.add_api_route(path, endpoint, methods=[method], response_model=None)
        for path, handler in (("/kv/link", self.link), ("/kv/map", self.map)):
            app.add_api_route(path, guarded(while_connected(handler)), methods=["POST"], response_model=None)

    async def add(self, request: Request) -> dict[str, Any]:
        """Compiles a document and answers with its id, the same for the same content."""
        body = DocumentBody.model_validate(await request.json())
        return _added(*await self._documents.add(body))

    async def list(self, request: Request) -> dict[str, Any]:
        """The tenant's documents, the oldest first."""
        records = await asyncio.to_thread(self._documents.listed, request.query_params.get("cache_salt"))
        return {"object": "list", "data": [_shown(record) for record in records]}

    async def show(self, request: Request) -> dict[str, Any]:
        """One document, with its text."""
        record = await self._found(request)
        return {**_shown(record), "text": record.text}

    async def delete(self, request: Request) -> dict[str, Any]:
        """Forgets a document: what was linked with it before stays where it is until it is evicted."""
        record = await self._found(request)
        await self._documents.delete(record)
        return {"id": record.id, "object": "document", "deleted": True}

    async def map(self, request: Request) -> dict[str, Any]:
        """Takes in a document that another worker compiles, through a pack, and answers with its id."""
        return _added(*await self._documents.map(MapBody.model_validate(await request.json())))

    async def link(self, request: Request) -> dict[str, Any]:
        """Links token ids, for /generate and completions: the answer names the `extra_key` to ask under."""
        body = LinkBody.model_validate(await request.json())
        finding = (asyncio.to_thread(self._documents.find, name, body.cache_salt) for name in body.documents)
        records = await asyncio.gather(*finding)
        answer, origins = await self._documents.link(body, records)
        return {**answer, "from": origins}

    async def _found(self, request: Request) -> DocumentRecord:
        name, salt = request.path_params["document"], request.query_params.get("cache_salt")
        return await asyncio.to_thread(self._documents.find, name, salt)


def _added(record: DocumentRecord, answer: Answer) -> dict[str, Any]:
    return {**_shown(record), "bytes": answer["bytes"], "ms": answer["ms"]}


def _shown(record: DocumentRecord) -> dict[str, Any]:
    return {
        "id": record.id, "object": "document", "method": record.method, "tokens": len(record.ids),
        "created": record.created, "expires": record.expires,
    }  # fmt: skip
