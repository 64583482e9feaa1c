"""The page at `/`: a person looks at tiers and decisions, and chats. Static files; their data come from `/status`.

They hold nothing secret, so they are served to everybody; where there are keys, the page asks for one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import Response

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/page.js": ("page.js", "text/javascript"),
    "/page/page.css": ("page.css", "text/css"),
}


def routes() -> APIRouter:
    """The page's routes; its files are read once."""
    router = APIRouter()
    for path, (name, kind) in _FILES.items():
        body = files(__name__).joinpath(name).read_bytes()
        router.add_api_route(path, _endpoint(body, kind), include_in_schema=False)
    return router


def _endpoint(body: bytes, kind: str) -> Callable[[], Awaitable[Response]]:
    async def page() -> Response:
        return Response(body, media_type=kind, headers=_HEADERS)

    return page
