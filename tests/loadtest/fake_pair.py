"""The fake server as a kvlift worker: it also says who it is, counts, and forgets when it is told to.

`python -m tests.loadtest.fake_pair --name large --service-s 0.01`, and the options of `fake_server`.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from tests.loadtest import fake_server


class FakeWorker(fake_server.FakeServer):
    """`lifts_failed_at`: the number of the lift from which on none is applied."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self._name = options.name
        self._counters = {"prefill_batches": 0, "prefill_requests": 0, "lift_batches": 0, "lifts": 0}
        self._flushes = 0
        self._applied_until = options.lifts_failed_at

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        match path.split("?")[0]:
            case "/kv/capabilities":
                fake_server._json(writer, 200, {"model": self._name, "model_digest": self._name * 8, "packs": []})
            case "/kv/counters":
                fake_server._json(writer, 200, self._counters)
            case "/flush_cache":
                self._flushes += 1
                fake_server._json(writer, 200, {})
            case "/flushes":
                fake_server._json(writer, 200, {"flushes": self._flushes})
            case "/kv/lift" if self._applied_until is not None and self._counters["lifts"] >= self._applied_until:
                fake_server._json(writer, 200, {"status": "fallback_prefill", "reason": "the source holds nothing"})
            case "/kv/lift":
                self._counters["lifts"] += 1
                self._counters["lift_batches"] += 1
                return await super()._answer(path, body, writer)
            case "/v1/chat/completions":
                self._counters["prefill_requests"] += 1
                self._counters["prefill_batches"] += 1
                return await super()._answer(path, body, writer)
            case _:
                return await super()._answer(path, body, writer)
        await writer.drain()
        return True


async def _serve(options: argparse.Namespace) -> None:
    server = await asyncio.start_server(FakeWorker(options).converse, "127.0.0.1", 0, backlog=1000)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="large")
    parser.add_argument("--service-s", type=float, default=0.0)
    parser.add_argument("--freeze-at", type=int)
    parser.add_argument("--freeze-s", type=float, default=2.0)
    parser.add_argument("--die-at", type=int)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--late", action="store_true")
    parser.add_argument("--lifts-failed-at", type=int)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
