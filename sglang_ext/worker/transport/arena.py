"""Parts of a buffer of fixed size."""

from __future__ import annotations

from sglang_ext.errors import TransferError

ALIGNMENT = 4096


class Arena:
    """Gives out parts of a buffer, first fit. Parts begin at whole pages and never overlap. Not for several threads."""

    def __init__(self, size: int) -> None:
        """size: bytes of the buffer."""
        self._size = size
        self._taken: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that are given out, in whole pages."""
        return sum(self._taken.values())

    def take(self, length: int) -> int:
        """The offset of a part of that many bytes. Raises TransferError where no gap is long enough."""
        pages = max(1, -(-length // ALIGNMENT)) * ALIGNMENT
        start = 0
        for offset in sorted(self._taken):
            if offset - start >= pages:
                break
            start = offset + self._taken[offset]
        if start + pages > self._size:
            raise TransferError(
                f"no room for a block of {length} bytes: {self.held_bytes} of the transfer buffer's {self._size} bytes "
                "are in use (--kv-buffer-bytes)"
            )
        self._taken[start] = pages
        return start

    def give_back(self, offset: int) -> None:
        """Frees the part at that offset. Raises KeyError where there is none."""
        del self._taken[offset]
