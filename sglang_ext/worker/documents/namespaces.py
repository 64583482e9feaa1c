"""Where linked KV lives in the tree.

What a position's entry holds depends on the documents before it and on where they stand. The namespace is made from
these, so that equal prompts with other documents in them never meet, and so that what two prompts have in common up to
a document is found under the namespace of the documents before it.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

from sglang_ext.identity import digest_fields
from sglang_ext.worker.documents.layout import Budget, Standing
from sglang_ext.worker.pool import Where


class Ancestor(NamedTuple):
    """A namespace that holds the same entries as a linked prompt's own, up to position `limit`."""

    where: Where
    limit: int


def namespace_of(documents: Sequence[Standing], budget: Budget, base: Where) -> str:
    """Never shared with native KV, other documents or places, another budget, or another salt.

    base: where the prompt's native KV lives.
    """
    fields = ["linked", repr(tuple(base)), repr(tuple(budget))]
    return "kvlift:" + digest_fields(fields + [part for one in documents for part in (one.key, str(one.start))])


def ancestors(documents: Sequence[Standing], budget: Budget, base: Where, length: int) -> list[Ancestor]:
    """Namespaces to look into beside the own one, for a prompt of `length` positions: those of its first m documents.

    With none of them it is the native tree, whose entries are exact, and so good for the whole prompt.
    """
    found = [Ancestor(base, length)]
    for count in range(1, len(documents)):
        inside = Where(namespace_of(documents[:count], budget, base))
        found.append(Ancestor(inside, documents[count].start))
    return found
