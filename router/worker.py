"""HTTP to one worker, over kept-alive connections.

A worker with a key in the config is called with that key and no other. A worker without one is called without
any: the client's own Authorization header is never forwarded.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
from pydantic import BaseModel

from router.breaker import Breaker
from router.config import Breaker as BreakerSettings
from router.config import Limits, Replica, Tier
from router.connections import Connections
from router.errors import ConfigError, UpstreamBroken, UpstreamError, UpstreamRefused, UpstreamStatus
from router.telemetry import tracing
from router.traffic import InFlight

# Less than the 5 s after which uvicorn, and so SGLang, closes an idle connection: a request must not meet the close.
_KEEP_IDLE_S = 4.0
_ERROR_BYTES = 64 * 1024
_BEHIND_GATEWAY = "a gateway stands before the workers of the tier, so the one that holds the KV cannot be named"


class Pack(BaseModel):
    name: str
    digest: str
    source_model_digest: str
    accepted: bool
    bench_only: bool = False
    reason: str | None = None


class Capabilities(BaseModel):
    """What a worker says of itself at `/kv/capabilities`; keys that are not listed here are ignored."""

    protocol: int
    model: str
    model_digest: str
    tokenizer_digest: str
    template_digest: str
    context_length: int | None = None
    packs: list[Pack] = []


class _Load(BaseModel):
    num_waiting_reqs: int


class _Loads(BaseModel):
    """SGLang's `/v1/loads`, one entry per data-parallel rank."""

    loads: list[_Load]


class Worker:
    """One worker of a tier. `aclose` ends its connections."""

    def __init__(self, tier: Tier, name: str, replica: Replica, limits: Limits, breaker: BreakerSettings) -> None:
        """Raises `ConfigError` where the worker's address or key is not known."""
        if replica.address is None:
            raise ConfigError(
                f"worker {name!r} has no address: use kvlift up, which starts it, or replace 'start' by 'address'"
            )
        self.tier = tier
        self.name = name
        self.address = replica.address.rstrip("/")
        self.api_key = replica.api_key()
        self.why_no_lift = _BEHIND_GATEWAY if replica.gateway else None
        self.in_flight = InFlight()  # chat calls
        self.breaker = Breaker(name, breaker)  # of chat calls
        headers = {"accept-encoding": "identity", "content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        self._client = httpx.AsyncClient(
            base_url=self.address,
            headers=headers,
            timeout=httpx.Timeout(None, connect=limits.connect_s),  # the other limits are the attempt's
            transport=Connections(_KEEP_IDLE_S, encrypted=self.address.startswith("https:")),
            event_hooks={"request": [_join_trace]},
            trust_env=False,  # a proxy of the machine is not between the router and its workers
        )

    async def open(self, path: str, content: bytes) -> httpx.Response:
        """Posts a request for an answer; the answer's body is not read yet and the caller closes it.

        Raises `UpstreamError`.
        """
        request = self._client.build_request("POST", path, content=content)
        try:
            response = await self._client.send(request, stream=True)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise UpstreamRefused(self.name, f"no connection to {self.address}: {error!r}") from error
        except httpx.TransportError as error:
            raise UpstreamBroken(self.name, "connection_lost", f"no answer from {self.address}: {error!r}") from error
        if response.status_code == 200:
            return response
        try:
            raise UpstreamStatus(self.name, response.status_code, await _error_of(response))
        finally:
            await response.aclose()

    async def healthy(self, timeout_s: float) -> None:
        """Asks `/health`. Raises `UpstreamError` unless the worker says that it is well."""
        await self._get("/health", timeout_s)

    async def capabilities(self, timeout_s: float) -> Capabilities:
        """Asks `/kv/capabilities`. Raises `UpstreamError`, or pydantic's `ValidationError`."""
        return Capabilities.model_validate_json((await self._get("/kv/capabilities", timeout_s)).content)

    async def queued(self, timeout_s: float) -> int:
        """Asks `/v1/loads` how many requests wait. Raises `UpstreamError`, or pydantic's `ValidationError`."""
        told = await self._get("/v1/loads?include=core", timeout_s)
        return sum(load.num_waiting_reqs for load in _Loads.model_validate_json(told.content).loads)

    async def lift(self, payload: dict[str, Any], timeout_s: float) -> bytes:
        """Posts `/kv/lift` and returns the answer's body. Raises `UpstreamError`."""
        return (await self._call("POST", "/kv/lift", timeout_s, json.dumps(payload).encode())).content

    async def documents(self, method: str, path: str, timeout_s: float, content: bytes | None) -> dict[str, Any]:
        """Calls one of the `/v1/documents` routes and returns the answer. Raises `UpstreamError`."""
        answer = _parsed((await self._call(method, path, timeout_s, content)).content)
        if not isinstance(answer, dict):
            raise UpstreamBroken(self.name, "bad_answer", f"{path}: the answer is no JSON object")
        return answer

    async def aclose(self) -> None:
        await self._client.aclose()

    async def _get(self, path: str, timeout_s: float) -> httpx.Response:
        return await self._call("GET", path, timeout_s, None)

    async def _call(self, method: str, path: str, timeout_s: float, content: bytes | None) -> httpx.Response:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, content=content)
        except TimeoutError as error:
            raise UpstreamError(self.name, "timeout", f"{path} took more than {timeout_s:g} s") from error
        except httpx.TransportError as error:
            raise UpstreamRefused(self.name, f"{self.address}{path}: {error!r}") from error
        if response.status_code != 200:
            raise UpstreamStatus(self.name, response.status_code, _parsed(response.content))
        return response


async def _join_trace(request: httpx.Request) -> None:
    tracing.inject(request.headers)


async def _error_of(response: httpx.Response) -> Any:
    body = b""
    try:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) > _ERROR_BYTES:
                break
    except httpx.TransportError as error:
        return f"{error!r} while reading the error"
    return _parsed(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return body[:500].decode(errors="replace")
