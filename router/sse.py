"""Server-sent events, by the rules of the HTML standard's event stream format."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

DONE = "[DONE]"


class SSEParser:
    """Turns byte chunks, cut anywhere, into the data of each event. Comments and other fields are dropped.

    An event ends at an empty line; what has not ended when the bytes do is not an event.
    """

    def __init__(self) -> None:
        self._decode = codecs.getincrementaldecoder("utf-8-sig")(errors="replace").decode
        self._line: list[str] = []  # pieces of the line that has not ended
        self._data: list[str] = []  # data lines of the event that has not ended
        self._after_cr = False

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The data of every event that `chunk` completes. Consume it before feeding again."""
        text = self._decode(chunk)
        if not text:
            return
        if self._after_cr and text[0] == "\n":  # the second half of a CRLF that was cut in two
            text = text[1:]
        self._after_cr = text.endswith("\r") if text else False
        *ended, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        for piece in ended:
            self._line.append(piece)
            line = "".join(self._line)
            self._line.clear()
            if line:
                self._take(line)
            elif self._data:
                yield "\n".join(self._data)
                self._data.clear()
        if rest:
            self._line.append(rest)

    def _take(self, line: str) -> None:
        field, _, value = line.partition(":")
        if field == "data":
            self._data.append(value.removeprefix(" "))


def encode(data: str) -> bytes:
    """One event. `data` may hold newlines."""
    return b"".join(b"data: " + line.encode() + b"\n" for line in data.split("\n")) + b"\n"
