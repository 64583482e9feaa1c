"""A server with one known service time, in a process of its own: `python -m tests.loadtest.fake_server`.

It is one first-come-first-served server: a request that comes at t is answered at max(t, free) + service_s, reckoned
and not slept one after another, so that the sleeps' inaccuracy does not add up. The request's `model` selects what is
answered; `/stats` tells what was asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import time
from typing import Any

PLAIN: list[dict[str, Any] | str] = [{"delta": {"content": "a"}}, {"finish_reason": "length"}, "[DONE]"]
ANSWERS: dict[str, list[dict[str, Any] | str]] = {
    "no-done": [{"delta": {"content": "a"}}, {"finish_reason": "length"}],
    "no-finish": [{"delta": {"content": "a"}}, "[DONE]"],
    "nothing": ["[DONE]"],
    "no-text": [{"delta": {"role": "assistant", "content": ""}}, {"finish_reason": "stop"}, "[DONE]"],
    "abort": [{"delta": {"content": "a"}}, {"finish_reason": "abort"}, "[DONE]"],
    "bad-json": ["{not json"],
    "bad-usage": [*PLAIN[:2], json.dumps({"choices": [], "kvlift": {"lift": {"ms": 3}}}), "[DONE]"],
    "error-event": [{"delta": {"content": "a"}}, json.dumps({"error": {"message": "boom"}}), "[DONE]"],
    "reasoning": [
        {"delta": {"role": "assistant", "content": "", "reasoning_content": None}},
        {"delta": {"reasoning_content": "hm"}},
        0.2,
        {"delta": {"content": "a"}},
        {"finish_reason": "stop"},
        "[DONE]",
    ],
    "tool": [
        {"delta": {"role": "assistant", "content": None}},
        {"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}},
        0.2,
        {"finish_reason": "tool_calls"},
        "[DONE]",
    ],
    "role-first": [
        {"delta": {"role": "assistant", "content": ""}},
        0.2,
        {"delta": {"content": "a"}},
        {"finish_reason": "stop"},
        "[DONE]",
    ],
}
USAGE = {"prompt_tokens": 11, "completion_tokens": 1}
TOLD = {
    "tier": "large",
    "escalated": True,
    "lift": {"status": "applied", "reason": None, "ms": {"map": 1.5, "total": 4.0}},
}


class FakeServer:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._free = 0.0
        self._connections = 0
        self._asked: list[tuple[str, dict[str, Any]]] = []
        self._indices: list[str] = []  # the prompts, in the order in which they came

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, for as long as the client keeps it."""
        self._connections += 1
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                lengths = [line.split(":")[1] for line in lines if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0])) if lengths else b""
                if not await self._answer(first.split(" ")[1], json.loads(body or "{}"), writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """False where the connection is to be cut."""
        match path:
            case "/stats":
                told = {"connections": self._connections, "prompts": self._indices, "asked": self._asked}
                _json(writer, 200, told)
            case "/kv/lift":
                self._asked.append(("lift", body))
                _json(writer, *_lifted(body))
            case "/v1/chat/completions":
                return await self._chat(body, writer)
            case _:
                _json(writer, 200, {})
        await writer.drain()
        return True

    async def _chat(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        options = self._options
        self._indices.append(body["messages"][0]["content"].split(" ")[0])
        if options.keep:
            self._asked.append(("chat", body))
        number = len(self._indices)
        if number == options.freeze_at:
            time.sleep(options.freeze_s)  # noqa: ASYNC251 - the whole process is to stand still
        if number == options.die_at:
            os._exit(1)
        self._free = max(time.monotonic(), self._free) + options.service_s
        await asyncio.sleep(self._free - time.monotonic())
        while options.late and (left := self._free - time.monotonic()) > 0:
            await asyncio.sleep(left)
        model = body["model"]
        if model == "status-500":
            _json(writer, 500, {"error": {"message": "out of memory"}})
            return True
        if model == "stall":
            await asyncio.sleep(600)
        if model == "hang-up":
            return False
        if model == "buffered":
            _json(writer, 200, {"choices": []})
            return True
        headers = "".join(f"x-kvlift-{name}: {value}\r\n" for name, value in _headers(model).items())
        writer.write(
            f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n{headers}\r\n".encode()
        )
        if model == "cut":
            _chunk(writer, b'data: {"choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n')
            await writer.drain()
            return False
        for part in ANSWERS.get(model, PLAIN):
            if isinstance(part, float):
                await writer.drain()
                await asyncio.sleep(part)
            else:
                _chunk(writer, _event(part, model))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def _event(part: dict[str, Any] | str, model: str) -> bytes:
    end = {"crlf": "\r\n", "cr": "\r"}.get(model, "\n")
    if isinstance(part, str):
        last = {"choices": [], "usage": USAGE, **({"kvlift": TOLD} if model == "router" else {})}
        before = f"data: {json.dumps(last)}{end}{end}" if part == "[DONE]" else ""
        return f"{before}data: {part}{end}{end}".encode()
    return f": ping{end}data: {json.dumps({'choices': [{'index': 0, **part}]})}{end}{end}".encode()


def _headers(model: str) -> dict[str, str]:
    return {"tier": "small", "escalated": "false", "lift": "none"} if model in ("router", "headers-only") else {}


def _lifted(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    match body["pack"]:
        case "broken":
            return 500, {"error": {"message": "no such pack"}}
        case "evicted":
            return 200, {"status": "fallback_prefill", "reason": "the source holds nothing", "rho": 0.3}
        case _:
            return 200, {"status": "applied", "namespace": "ns-1", "ms": {"map": 2.0, "total": 5.0}, "rho": body["rho"]}


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _json(writer: asyncio.StreamWriter, status: int, body: Any) -> None:
    data = json.dumps(body).encode()
    writer.write(
        f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )


async def _serve(options: argparse.Namespace) -> None:
    server = await asyncio.start_server(FakeServer(options).converse, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--service-s", type=float, default=0.0)
    parser.add_argument("--freeze-at", type=int, help="number of the request at which the whole process sleeps")
    parser.add_argument("--freeze-s", type=float, default=2.0)
    parser.add_argument("--die-at", type=int, help="number of the request at which the process ends at once")
    parser.add_argument("--late", action="store_true", help="hold answers back until nothing is computed any more")
    parser.add_argument("--keep", action="store_true", help="keep the chat bodies for /stats")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
