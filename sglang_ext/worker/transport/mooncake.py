"""Blocks from host to host, through Mooncake's TransferEngine.

The source copies a block into its registered buffer and hands out a ticket; the target reads it from there with
the engine, without the source's help, and publishes it in its own shared memory. A ticket's nonce lies before the
block: once the source has dropped it, a second or late read finds another one.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from dataclasses import dataclass
from typing import BinaryIO

import xxhash

from sglang_ext.errors import BlockError, TransferError
from sglang_ext.worker.handover import unless_given_up
from sglang_ext.worker.transport.arena import Arena
from sglang_ext.worker.transport.engine import Engine
from sglang_ext.worker.transport.shared_memory import SharedMemory

_NONCE_BYTES = 16
_HANDLE = re.compile(
    r"kvlift-mooncake/(?P<session>[0-9A-Za-z.-]{1,253}:[0-9]{1,5})/(?P<address>[0-9a-f]{1,16})/(?P<length>[0-9]{1,15})"
    r"/(?P<checksum>[0-9a-f]{32})/(?P<nonce>[0-9a-f]{32})"
)


@dataclass(frozen=True)
class Ticket:
    """Where an offered block lies: `length` bytes of a block's file behind the nonce at `address`."""

    session: str
    address: int
    length: int
    checksum: str
    nonce: bytes

    @property
    def span(self) -> int:
        """Bytes to read: the nonce and the block."""
        return _NONCE_BYTES + self.length

    def __str__(self) -> str:
        where = f"{self.session}/{self.address:x}/{self.length}"
        return f"kvlift-mooncake/{where}/{self.checksum}/{self.nonce.hex()}"

    @classmethod
    def parse(cls, handle: str) -> Ticket:
        """Raises TransferError for anything but the text of a ticket: it comes over HTTP."""
        found = _HANDLE.fullmatch(handle)
        if found is None:
            raise TransferError(f"{handle[:200]!r} is not a block handle of Mooncake's")
        session, address, length, checksum, nonce = found.groups()
        return cls(session, int(address, 16), int(length), checksum, bytes.fromhex(nonce))


class Mooncake:
    """The carrier between hosts. Bounded by its engine's buffer, in which both directions have their parts."""

    name = "mooncake"
    remote = True

    def __init__(self, memory: SharedMemory, engine: Engine) -> None:
        self._memory = memory
        self._engine = engine
        self._arena = Arena(len(engine.buffer))
        self._offered: dict[bytes, int] = {}

    @property
    def held_bytes(self) -> int:
        """Of the buffer: blocks on offer and reads that have not ended."""
        return self._arena.held_bytes

    async def offer(self, local: str) -> str:
        file = self._memory.take_file(local)
        length = os.fstat(file.fileno()).st_size
        try:
            offset = self._arena.take(_NONCE_BYTES + length)
        except TransferError:
            file.close()
            raise
        return await unless_given_up(self._fill(file, offset, length), self.drop)

    async def collect(self, handle: str, timeout_s: float) -> str:
        ticket = Ticket.parse(handle)
        offset = self._arena.take(ticket.span)
        try:
            async with asyncio.timeout(timeout_s):
                return await unless_given_up(self._read(ticket, offset), self._memory.drop)
        except TimeoutError:
            raise TransferError(
                f"the block of {ticket.length} bytes did not come from {ticket.session} within {timeout_s} s"
            ) from None

    def drop(self, handle: str) -> None:
        nonce = Ticket.parse(handle).nonce
        offset = self._offered.pop(nonce, None)
        if offset is not None:
            self._engine.buffer[offset : offset + _NONCE_BYTES] = bytes(_NONCE_BYTES)
            self._arena.give_back(offset)

    def owns(self, handle: str) -> bool:
        return _HANDLE.fullmatch(handle) is not None

    async def _fill(self, file: BinaryIO, offset: int, length: int) -> str:
        """Copies a block's file into the buffer and puts it on offer."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        try:
            with file:
                checksum = await asyncio.to_thread(self._copy_in, file, offset, length)
        except BaseException:
            self._arena.give_back(offset)
            raise
        self._engine.buffer[offset : offset + _NONCE_BYTES] = nonce
        self._offered[nonce] = offset
        return str(Ticket(self._engine.session, self._engine.address + offset, length, checksum, nonce))

    async def _read(self, ticket: Ticket, offset: int) -> str:
        """Reads an offered block into the buffer, checks it, and publishes it here."""
        try:
            await self._engine.read(ticket.session, ticket.address, offset, ticket.span)
            return await asyncio.to_thread(self._copy_out, ticket, offset)
        finally:
            self._arena.give_back(offset)

    def _copy_in(self, file: BinaryIO, offset: int, length: int) -> str:
        body = self._body(offset, length)
        if file.readinto(body) != length:
            raise TransferError(f"the block's file ended before its {length} bytes")
        return xxhash.xxh3_128_hexdigest(body)

    def _copy_out(self, ticket: Ticket, offset: int) -> str:
        if self._engine.buffer[offset : offset + _NONCE_BYTES] != ticket.nonce:
            raise TransferError(
                f"the block at {ticket.session} is gone: it was fetched or released, or its time was over"
            )
        body = self._body(offset, ticket.length)
        if xxhash.xxh3_128_hexdigest(body) != ticket.checksum:
            raise BlockError(f"the block from {ticket.session} was changed on its way: checksums differ")
        return self._memory.publish_file(body)

    def _body(self, offset: int, length: int) -> memoryview:
        return self._engine.buffer[offset + _NONCE_BYTES : offset + _NONCE_BYTES + length]
