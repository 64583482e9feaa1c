"""A compiled document: the KV of its tokens, and of the soft ones that a packet puts around them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_ext.block import KVBlock
from sglang_ext.errors import DocumentError

SOFT = -1  # in the place of a token's id: an entry of a learned embedding, which no id gives


@dataclass(frozen=True)
class Document:
    """KV of `header` soft entries, the document's own n >= 1 tokens, and `trailer` soft entries.

    block: header + n + trailer entries, keys free of position, `SOFT` in the place of the soft entries' ids. Every
    entry takes one logical position where the document is linked. Raises DocumentError where the ids do not fit.
    """

    block: KVBlock
    header: int = 0
    trailer: int = 0

    def __post_init__(self) -> None:
        if min(self.header, self.trailer) < 0 or len(self.block) - self.header - self.trailer < 1:
            raise DocumentError(
                f"a document of {len(self.block)} entries, {self.header} of them header and {self.trailer} trailer, "
                "holds no token; a document needs at least one"
            )
        soft = self.block.tokens == SOFT
        own = soft[self.header : len(self.block) - self.trailer]
        if bool(own.any()) or int(soft.sum()) != self.header + self.trailer:
            raise DocumentError(
                f"expected {self.header} soft entries before and {self.trailer} after the document's tokens, found "
                f"{int(soft.sum())} in the ids {self.block.tokens.tolist()[:12]}..."
            )

    def __len__(self) -> int:
        return len(self.block)

    @property
    def ids(self) -> list[int]:
        """The document's own tokens."""
        return self.block.tokens[self.header : len(self.block) - self.trailer].tolist()

    def without_trailer(self) -> Document:
        """The same document up to its last token."""
        return replace(self, block=self.block.span(0, len(self.block) - self.trailer), trailer=0)
