"""Real workers for the tests: started once, stopped with every process they started."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import httpx

from router import processes

START_S = 400


class Worker:
    """One `kvlift worker`. `call` posts JSON; the strict memory checks of SGLang are on."""

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        packs: Sequence[Path] = (),
        arguments: Sequence[str] = (),
        api_key: str | None = None,
    ) -> None:
        self.name, self.model, self.api_key = name, model, api_key
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"{name}.log"
        self.client = httpx.Client(base_url=self.url, timeout=300, headers=self._headers())
        command = [sys.executable, "-m", "router.cli", "worker", "--model", str(model), "--port", str(self.port)]
        command += ["--served-model-name", f"{name}-served"]
        for pack in packs:
            command += ["--pack", str(pack)]
        if api_key:
            command += ["--api-key", api_key]
        command += ["--allow-bench-pack", "--workers-on-host", "2", "--max-total-tokens", "40000", "--dtype", "float32"]
        strict = {f"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_{when}": "1" for when in ("BUSY", "IDLE")}
        previous = {key: os.environ.get(key) for key in strict}
        os.environ.update(strict)
        try:
            self._process = processes.start([*command, *arguments], self.log)
        finally:
            for key, value in previous.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> Worker:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"{self.name} ended at start:\n{self.tail()}"
            try:
                if self.client.get("/health", timeout=5).status_code == 200:
                    return self
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        raise AssertionError(f"{self.name} was not ready in {START_S} s:\n{self.tail()}")

    def call(self, path: str, **body: Any) -> dict[str, Any]:
        reply = self.client.post(path, json=body)
        assert reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}\n{self.tail()}"
        return reply.json()

    def flush(self) -> None:
        reply = self.client.post("/flush_cache", params={"timeout": 30})
        assert reply.status_code == 200, f"flush: {reply.text}\n{self.tail()}"

    def generate(self, ids: Sequence[int], tokens: int = 8, **more: Any) -> dict[str, Any]:
        """Greedy, end of text ignored, with the first token's top log-probabilities."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return self.call(
            "/generate", input_ids=list(ids), sampling_params=sampling, return_logprob=True, top_logprobs_num=50, **more
        )  # fmt: skip

    def lift(self, source: Worker, ids: Sequence[int], pack: str, /, **more: Any) -> dict[str, Any]:
        """In any case, unless `when` says otherwise: models this small are prefilled faster than lifted."""
        where = {"url": source.url, "api_key": source.api_key}
        body = {"input_ids": list(ids), "source": where, "pack": pack, "when": "always", "timeout_s": 120}
        return self.call("/kv/lift", **{**body, **more})

    def held(self) -> dict[str, int]:
        """What the worker holds for work under way: all 0 at rest. Waits for a scheduler in a long step."""
        reply = self.client.get("/kv/held")
        while reply.status_code == 504:
            reply = self.client.get("/kv/held")
        assert reply.status_code == 200, f"/kv/held: {reply.status_code} {reply.text}\n{self.tail()}"
        return reply.json()

    def blocks(self) -> list[str]:
        """The blocks of this worker's processes that lie in shared memory."""
        ours = {process.pid for process in processes.tree(self._process.pid)}
        return [path.name for path in Path("/dev/shm").glob("kvlift-[0-9]*-*") if int(path.name.split("-")[1]) in ours]

    def rest(self, seconds: float = 60) -> None:
        """Waits until the worker holds nothing any more, or fails the test with what it holds."""
        deadline = time.monotonic() + seconds
        while any((held := self.held()).values()) or self.blocks():
            assert time.monotonic() < deadline, f"{self.name} still holds {held} {self.blocks()}\n{self.tail()}"
            time.sleep(0.05)

    def counters(self) -> dict[str, int]:
        return self.client.get("/kv/counters").json()

    @contextmanager
    def decoding(self, ids: Sequence[int], tokens: int = 4000) -> Iterator[None]:
        """Inside the block a request decodes; it is given up at the end."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body = {"input_ids": list(ids), "sampling_params": sampling, "stream": True}
        with self.client.stream("POST", "/generate", json=body) as reply:
            lines = reply.iter_lines()
            for _ in range(3):  # an event, a blank line, and the next event
                next(lines)
            yield

    def alive(self) -> bool:
        return self._process.poll() is None and self.client.get("/model_info").status_code == 200

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:]) if self.log.exists() else ""

    def signal_scheduler(self, number: signal.Signals) -> None:
        """Sends a signal to the scheduler process: SIGSTOP makes it hang, SIGKILL is a crash."""
        for process in processes.tree(self._process.pid):
            if "scheduler" in process.name() or any("scheduler" in part for part in process.cmdline()):
                process.send_signal(number)

    def kill(self) -> None:
        """Ends all of the worker's processes at once, as a host that fails would."""
        for process in processes.tree(self._process.pid):
            process.kill()

    def stop(self) -> None:
        self.client.close()
        processes.end(processes.tree(self._process.pid), 10)
        self._process.wait()

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def hang_up(url: str, path: str, body: dict[str, Any], ready: Callable[[], object], api_key: str | None = None) -> None:
    """Posts a request and closes its connection once `ready` has returned, whatever has come by then."""
    data, where = json.dumps(body).encode(), httpx.URL(url)
    head = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(data)}"]
    head += [f"authorization: Bearer {api_key}"] if api_key else []
    with socket.create_connection((where.host, where.port or 80)) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        ready()


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Waits for a condition, or fails the test."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(0.01)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def text(answer: dict[str, Any]) -> list[int]:
    """The tokens of a /generate answer."""
    return [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]


def first_logprobs(answer: dict[str, Any]) -> dict[int, float]:
    """The first token's top log-probabilities, by token."""
    return {token: logprob for logprob, token, _ in answer["meta_info"]["output_top_logprobs"][0]}


def cached(answer: dict[str, Any]) -> int:
    return answer["meta_info"]["cached_tokens"]
