"""Runs the app: a uvicorn server that drains before it stops.

uvicorn alone closes its socket at the first signal, so that a load balancer sees refused connections where it
should read "not ready". Here SIGTERM and SIGINT first turn `/ready` to 503 and refuse new requests; the server
stops when the answers in flight are done, or after the grace period. A second signal stops it at once.
"""

from __future__ import annotations

import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from router.config import Listen
from router.errors import ConfigError
from router.gateway import Gateway

_LAST_WRITES_S = 1  # for connections that are still open when the grace period is over


def bind(listen: Listen) -> socket.socket:
    """The listening socket; its port is known before the server runs. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # With the protocol named: asyncio turns Nagle's algorithm off only then, and each event would wait 40 ms for it.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((listen.host, listen.port))
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"listen: cannot bind {listen.host}:{listen.port}: {error}; choose another port, or 0"
        ) from error
    return sock


def address(sock: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class DrainingServer(uvicorn.Server):
    """Serves `app` until a signal, then drains for at most `drain_s` seconds."""

    def __init__(self, app: FastAPI, drain_s: float) -> None:
        super().__init__(
            uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_WRITES_S)
        )
        self.gateway: Gateway = app.state.gateway
        self._drain_s = drain_s
        self._stop_at: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """In place of uvicorn's, which would stop at once and raise the signal again after a clean end."""
        if self._stop_at is not None:
            self.should_exit = self.force_exit = True
            return
        self.leave()

    def leave(self) -> None:
        """Begins to drain; `serve` returns when that is over."""
        self.gateway.drain()
        self._stop_at = self._stop_at or time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        over = self._stop_at is not None and (self.gateway.idle or time.monotonic() >= self._stop_at)
        return await super().on_tick(counter) or over
