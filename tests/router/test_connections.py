"""Connections to a worker: as many as are needed at once, used again, and never by two requests at a time."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import httpx
import pytest

from router.connections import Connections

BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"


class Server:
    """Answers by the path: /whole, /half (and then nothing), /close (after a whole answer), /slow (0.05 s)."""

    def __init__(self):
        self.connections = 0
        self.open = 0
        self.served_by = []  # the number of the connection, for each request

    async def serve(self, reader, writer):
        self.connections += 1
        self.open += 1
        number = self.connections
        busy = False
        try:
            while line := await reader.readline():
                path = line.split()[1].decode()
                while (await reader.readline()).strip():
                    pass
                assert not busy, "two requests at once"
                busy = True
                self.served_by.append(number)
                if path == "/slow":
                    await asyncio.sleep(0.05)
                writer.write(BEGUN if path == "/half" else b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwhole")
                await writer.drain()
                busy = path == "/half"
                if path == "/close":
                    return
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def client(keep_idle_s=4.0):
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        transport = Connections(keep_idle_s, encrypted=False)
        async with httpx.AsyncClient(base_url=url, transport=transport, timeout=10) as http:
            yield server, http
        async with asyncio.timeout(10):
            while server.open:
                await asyncio.sleep(0.01)


def run(work):
    asyncio.run(asyncio.wait_for(work(), 20))


def test_requests_in_turn_use_one_connection():
    async def work():
        async with client() as (server, http):
            for _ in range(5):
                assert (await http.get("/whole")).text == "whole"
            assert server.connections == 1

    run(work)


@pytest.mark.parametrize("count", [2, 50])
def test_requests_at_once_use_one_each_and_these_are_used_again(count):
    async def work():
        async with client() as (server, http):
            for _ in range(3):
                await asyncio.gather(*(http.get("/slow") for _ in range(count)))
            assert server.connections == count

    run(work)


def test_the_connection_that_was_used_last_is_used_next_so_that_the_others_can_go():
    async def work():
        async with client() as (server, http):
            await asyncio.gather(*(http.get("/slow") for _ in range(5)))
            for _ in range(4):
                await http.get("/whole")
            assert len(set(server.served_by[:5])) == 5 and len(set(server.served_by[5:])) == 1

    run(work)


def test_an_answer_that_is_left_halfway_ends_its_connection_and_the_next_request_has_another():
    async def work():
        async with client() as (server, http):
            for _ in range(3):
                async with http.stream("GET", "/half") as response:
                    assert await anext(response.aiter_bytes()) == b"half"
            assert (await http.get("/whole")).text == "whole"
            assert server.connections == 4

    run(work)


def test_a_connection_that_the_worker_closed_is_not_used_again():
    async def work():
        async with client() as (server, http):
            await http.get("/close")
            async with asyncio.timeout(10):
                while server.open:
                    await asyncio.sleep(0.01)
            assert (await http.get("/whole")).text == "whole"
            assert server.connections == 2

    run(work)


def test_a_connection_that_was_idle_too_long_is_closed_and_not_used_again():
    async def work():
        async with client(keep_idle_s=0.05) as (server, http):
            await asyncio.gather(*(http.get("/slow") for _ in range(5)))
            await asyncio.sleep(0.1)
            await http.get("/whole")
            assert server.connections == 6
            async with asyncio.timeout(10):
                while server.open > 1:
                    await asyncio.sleep(0.01)

    run(work)


def test_a_request_that_is_given_up_leaves_no_connection_behind():
    async def work():
        async with client() as (_, http):
            for _ in range(5):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await http.get("/slow")
            assert (await http.get("/whole")).text == "whole"

    run(work)


def test_no_connection_is_an_error_each_time():
    async def work():
        async with httpx.AsyncClient(transport=Connections(4.0, encrypted=False)) as http:
            for _ in range(3):
                with pytest.raises(httpx.ConnectError):
                    await http.get("http://127.0.0.1:9/")

    run(work)
