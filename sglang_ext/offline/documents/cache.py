"""A linked prompt's cache on a transformers model: filled, asked by planners, computed."""

from __future__ import annotations

import torch

from sglang_ext.attention import attention_received
from sglang_ext.documents.document import SOFT
from sglang_ext.documents.link import Linked
from sglang_ext.documents.planners import Planner
from sglang_ext.offline.executor import Probe, Row, TransformersExecutor, Work
from sglang_ext.transfer.maps import CrossModelMap


class LinkedCache:
    """The `Evidence` of one prompt: fills its row when it is made, and computes it when it is prefilled.

    maps: through which another model's documents go; spare: room for so many tokens behind the prompt.
    """

    def __init__(
        self, executor: TransformersExecutor, linked: Linked, spare: int = 0, maps: CrossModelMap | None = None
    ) -> None:
        self.executor, self.linked = executor, linked
        self.row: Row = executor.row(len(linked) + spare)
        self.disagreement = torch.zeros(0 if maps is None else executor.geometry.layers, len(linked))
        for one in linked.placed:
            if maps is None:
                executor.fill_block(self.row, one.document.block, one.start)
            else:
                outside = executor.fill_mapped(self.row, one.document.block, maps, one.start)
                self.disagreement[:, one.start : one.stop] = outside

    def prefill(self, planner: Planner) -> torch.Tensor:
        """Computes what the planner says; the last logits, float32 [1, V]."""
        self.linked = planner(self.linked, self)
        return self.executor.run([self.row], [self.linked.tokens.tolist()], [self.linked.plan])

    def deviation(self, layer: int) -> torch.Tensor:
        row, positions = self.row, torch.nonzero(self.linked.tokens != SOFT).flatten()
        before = row.keys[layer].float().clone(), row.values[layer].float().clone()
        self.executor.compute([Work(row, self.linked.tokens[positions], positions)], layers=layer + 1)
        return sum(
            (new[: len(self.linked)].float() - old[: len(self.linked)]).square().sum((-1, -2)).cpu()
            for new, old in zip((row.keys[layer], row.values[layer]), before)
        )

    def asked(self) -> torch.Tensor:
        query, own = torch.tensor(self.linked.query), self.linked.candidates
        probe = Probe()
        # Their KV of layer 0 is what the prefill will write there again.
        self.executor.compute([Work(self.row, self.linked.tokens[query], query)], probe, layers=1)
        found = torch.zeros(len(self.linked))
        if len(own):
            # Every one of them lies before the query, and the share is among them alone.
            everything = torch.full((len(query),), len(own) - 1)
            keys = self.row.keys[0, own]
            found[own] = attention_received(probe.queries[0][0], everything, keys, probe.scale).cpu()
        return found
