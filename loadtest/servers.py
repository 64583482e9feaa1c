"""The servers of a run, between the loads: who they are, what they counted, an empty cache."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import httpx
import psutil
from pydantic import BaseModel, ValidationError

from loadtest.errors import ServerFault, TargetDown
from loadtest.run import Machine, Served

_TIMEOUT_S = 60.0
_DRAIN_S = 30  # a flush waits so long for what is still in flight


class _Capabilities(BaseModel):
    """Of `/kv/capabilities`; keys that are not listed here are ignored."""

    model: str
    model_digest: str


@dataclass(frozen=True, slots=True)
class Counted:
    """What a worker has counted since its start; empty where it does not tell (`/kv/counters`)."""

    values: Mapping[str, float]

    def since(self, before: Counted) -> Counted:
        """What came on top; nothing where it did not tell either time."""
        return Counted(
            {name: self.values[name] - value for name, value in before.values.items() if name in self.values}
        )

    @property
    def batches(self) -> int | None:
        """Batches of lifts where there were lifts, else of prefills; None where it does not tell."""
        name = "lift_batches" if self.values.get("lifts") else "prefill_batches"
        return int(self.values[name]) if name in self.values else None

    @property
    def mean_batch(self) -> float | None:
        """Requests per such batch; None where it does not tell, or there was none."""
        requests = self.values.get("lifts") or self.values.get("prefill_requests")
        return requests / self.batches if requests and self.batches else None


class Worker:
    """An SGLang worker with kvlift's plugin. For use between loads: it blocks."""

    def __init__(self, url: str, threads: int | None = None) -> None:
        """Asks who it is. Raises `TargetDown` or `ServerFault`."""
        self.url = url.rstrip("/")
        reply = self._call("GET", "/kv/capabilities")
        try:
            told = _Capabilities.model_validate_json(reply.content)
        except ValidationError as error:
            raise ServerFault(
                f"{self.url} is no kvlift worker: HTTP {reply.status_code} at /kv/capabilities"
            ) from error
        self.served = Served(url=self.url, model=told.model, model_digest=told.model_digest, threads=threads)

    def flush(self) -> None:
        """Waits until it is idle and empties its cache. Raises `TargetDown` or `ServerFault`."""
        reply = self._call("POST", "/flush_cache", timeout=_DRAIN_S)
        if reply.status_code != 200:
            raise ServerFault(f"{self.url} did not empty its cache: {reply.text.strip()[:200]}")

    def counted(self) -> Counted:
        """Empty where it has no counters, or does not answer them in time. Raises `TargetDown`."""
        reply = self._call("GET", "/kv/counters")
        if reply.status_code != 200:
            return Counted({})
        return Counted({name: value for name, value in reply.json().items() if isinstance(value, (int, float))})

    def _call(self, method: str, path: str, **parameters: Any) -> httpx.Response:
        try:
            return httpx.request(method, self.url + path, params=parameters, timeout=_TIMEOUT_S)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{error or repr(error)}; is the server running, and is this its address?"
            raise TargetDown(f"no answer from {self.url}: {reason}") from error


@dataclass(frozen=True, slots=True)
class Servers:
    """`router_url`: before both workers, with a policy for the cascade as its default."""

    target: Worker
    source: Worker | None = None
    router_url: str | None = None


def this_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> Machine:
    """What the workers run on, where they run here."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return Machine(
        processor=names[0] if names else platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=round(psutil.virtual_memory().total / 1e9, 1),
        python=platform.python_version(),
        kvlift=_version("kvlift"),
        sglang=_version("sglang"),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
