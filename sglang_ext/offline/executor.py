"""Runs prefill plans on a transformers model: the same mathematics as in the worker, without a server.

A `Row` is one prompt's cache, with keys rotated as in a server's pool. Rows of different lengths are
computed in one forward: the model sees their chosen tokens as one sequence with explicit positions,
and only attention, which is ours, knows where one row ends and the next begins.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, Sequence

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from sglang_ext.attention import LAST_QUERIES, attention_received, frontier_attention
from sglang_ext.block import KVBlock
from sglang_ext.errors import BlockError
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.offline.decoding import DecodeStep, Slab
from sglang_ext.phases import Phases
from sglang_ext.plan import Fill, FillKind, PrefillPlan, native, repaired
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.selectors import Budget, Scorer, top_positions

_ATTENTION = "kvlift_frontier"


@dataclass
class Row:
    """One prompt's cache: keys (rotated) and values [layers, capacity, kv_heads, head_dim].

    `length` is the number of positions that hold KV; positions beyond it are free.
    """

    keys: torch.Tensor
    values: torch.Tensor
    length: int = 0


@dataclass(frozen=True)
class Work:
    """Tokens [S] of one row to run at sorted positions [S]; embeddings: [S, hidden] in the place of the tokens' own."""

    row: Row
    tokens: torch.Tensor
    positions: torch.Tensor
    embeddings: torch.Tensor | None = None


@dataclass
class Probe:
    """What a forward also reports, layer by layer.

    outputs: attention outputs [sum S, query_heads, head_dim]; received: per piece of work, the attention
    that each position received, float32 [T]; queries: per piece of work, rotated, [S, query_heads, head_dim];
    scale: of the softmax's logits.
    """

    outputs: list[torch.Tensor] = field(default_factory=list)
    queries: list[list[torch.Tensor]] = field(default_factory=list)
    received: list[list[torch.Tensor]] = field(default_factory=list)
    scale: float = 0.0


@dataclass
class _Pass:
    """The attention of a forward over pieces of work."""

    work: Sequence[Work]
    probe: Probe | None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Writes the computed keys and values into their rows and attends over whole rows.

        query: [N, query_heads, head_dim]; key, value: [N, kv_heads, head_dim], key rotated.
        """
        mixed, received, at = [], [], 0
        for piece in self.work:
            rows = slice(at, at + len(piece.tokens))
            row, positions = piece.row, piece.positions
            row.keys[layer, positions] = key[rows]
            row.values[layer, positions] = value[rows]
            end = int(positions[-1]) + 1
            mixed.append(
                frontier_attention(query[rows], positions, row.keys[layer, :end], row.values[layer, :end], scale)
            )
            if self.probe is not None:
                received.append(attention_received(query[rows], positions, row.keys[layer, :end], scale))
            at = rows.stop
        output = torch.cat(mixed)
        if self.probe is not None:
            self.probe.outputs.append(output)
            self.probe.received.append(received)
            self.probe.scale = scale
            self.probe.queries.append(list(query.split([len(piece.tokens) for piece in self.work])))
        return output


class TransformersExecutor:
    """Prefills, fills, computes and decodes rows of one model. No gradients are kept."""

    def __init__(self, model: PreTrainedModel, identity: ModelIdentity) -> None:
        AttentionInterface.register(_ATTENTION, _attend)
        model.set_attn_implementation(_ATTENTION)
        self.model = model.eval()
        self.identity = identity
        self.geometry = KVGeometry.from_config(model.config.to_dict())
        self.rotation = Rotation(self.geometry.rope, model.device)

    @classmethod
    def from_folder(cls, folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> TransformersExecutor:
        model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype).to(device)
        return cls(model, ModelIdentity.from_folder(folder))

    def row(self, capacity: int) -> Row:
        """An empty row for `capacity` positions."""
        g = self.geometry
        shape = (g.layers, capacity, g.kv_heads, g.head_dim)
        make = {"dtype": self.model.dtype, "device": self.model.device}
        return Row(torch.zeros(shape, **make), torch.zeros(shape, **make))

    @torch.inference_mode()
    def compute(
        self, work: Sequence[Work], probe: Probe | None = None, layers: int | None = None
    ) -> list[torch.Tensor]:
        """Runs the work's tokens in one forward and writes their KV into their rows.

        layers: run and write the first so many, all where None. Returns the last hidden states, [S, hidden] per piece
        of work (of use only where all layers ran). Adds to `probe` where given.
        """
        embedded = torch.cat([self._embedded(piece) for piece in work])
        positions = torch.cat([piece.positions for piece in work]).to(self.model.device)
        with self._first_layers(layers):
            hidden = self._forward(embedded, positions, _Pass(work, probe))
        for piece in work:
            piece.row.length = max(piece.row.length, int(piece.positions[-1]) + 1)
        return list(hidden.split([len(piece.tokens) for piece in work]))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [..., vocabulary] of hidden states."""
        return self.model.lm_head(hidden).float()

    def prefill(self, prompts: Sequence[Sequence[int]], spare: int = 0) -> tuple[list[Row], torch.Tensor]:
        """Native prefill. Returns rows with room for `spare` more tokens, and the last logits [n, V]."""
        rows = [self.row(len(ids) + spare) for ids in prompts]
        return rows, self.run(rows, prompts, [native(len(ids)) for ids in prompts])

    def block(self, row: Row, tokens: Sequence[int], attention: torch.Tensor | None = None) -> KVBlock:
        """The first len(tokens) positions of a row as a position-free block."""
        n = len(tokens)
        return KVBlock.from_rotated(
            tokens, row.keys[:, :n], row.values[:, :n].clone(), self.rotation, self.geometry, self.identity,
            attention=attention,
        )  # fmt: skip

    def attention_received(self, row: Row, tokens: Sequence[int]) -> torch.Tensor:
        """The attention that a prefilled row's first len(tokens) positions received: float32, summing to 1.

        Of the last 32 queries, averaged over the last quarter of the layers. Runs those queries again, which
        writes the same KV again.
        """
        n = len(tokens)
        positions = torch.arange(max(0, n - LAST_QUERIES), n)
        probe = Probe()
        self.compute([Work(row, torch.tensor(tokens)[positions], positions)], probe)
        last_quarter = probe.received[-max(1, self.geometry.layers // 4) :]
        return torch.stack([layer[0] for layer in last_quarter]).mean(0)

    def fill_block(self, row: Row, block: KVBlock, start: int) -> None:
        """Writes a block of this model into a row, its keys moved to start, start + 1, ... (equation 3 of SemPIC).

        Raises BlockError for a block of another model.
        """
        if (block.identity.model, block.geometry) != (self.identity.model, self.geometry):
            raise BlockError(
                f"the block is of model {block.identity.model[:12]}, this is {self.identity.model[:12]}; "
                "compile the document with this model, or map it through a pack"
            )
        span = slice(start, start + len(block))
        turn = self.rotation.at(torch.arange(start, start + len(block), device=row.keys.device))
        row.keys[:, span] = turn.rotate(block.keys.to(row.keys.device)).to(row.keys.dtype)
        row.values[:, span] = block.values.to(row.values)

    def fill_mapped(
        self, row: Row, block: KVBlock, maps: CrossModelMap, start: int = 0, phases: Phases | None = None
    ) -> torch.Tensor:
        """Writes a source block through `maps` into a row. Returns the disagreement: float32 [layers, T]."""
        phases = phases or Phases()
        shape = (len(block), self.geometry.kv_heads, self.geometry.head_dim)
        span = slice(start, start + len(block))
        turn = self.rotation.at(torch.arange(start, start + len(block), device=row.keys.device))
        disagreement = []
        for layer, keys, values, outside in maps.predict(block, phases):
            with phases("write"):
                row.keys[layer, span] = turn.rotate(keys.view(shape)).to(row.keys.dtype)
                row.values[layer, span] = values.view(shape).to(row.values.dtype)
            disagreement.append(outside)
        return torch.stack(disagreement)

    def lift(
        self,
        prompts: Sequence[Sequence[int]],
        blocks: Sequence[KVBlock],
        maps: CrossModelMap,
        scorer: Scorer,
        budget: Budget,
        spare: int = 0,
        phases: Phases | None = None,
    ) -> tuple[list[Row], torch.Tensor, list[PrefillPlan]]:
        """Maps each prompt's block and recomputes the positions that scorer and budget choose, as one batch.

        A block may cover only a prefix of its prompt; the rest is computed. Returns rows, the last
        logits [n, V] and the plans. Adds to the phases `gather`, `map`, `score`, `write` and `recompute`.
        """
        phases = phases or Phases()
        rows, plans = [], []
        for ids, block in zip(prompts, blocks):
            row = self.row(len(ids) + spare)
            span = block.span(0, min(len(block), len(ids) - 1))
            disagreement = self.fill_mapped(row, span, maps, phases=phases)
            with phases("score"):
                positions = top_positions(scorer(span, disagreement), budget)
            plans.append(repaired(len(ids), [Fill(0, len(span), FillKind.MAPPED)], positions))
            rows.append(row)
        with phases("recompute"):
            logits = self.run(rows, prompts, plans)
        return rows, logits, plans

    def run(self, rows: Sequence[Row], prompts: Sequence[Sequence[int]], plans: Sequence[PrefillPlan]) -> torch.Tensor:
        """Computes what plans say of rows whose fills are done. Returns the last logits [n, V]."""
        hidden = self.compute(
            [Work(row, torch.tensor(ids)[plan.compute], plan.compute) for row, ids, plan in zip(rows, prompts, plans)]
        )
        return self.logits(torch.stack([states[-1] for states in hidden]))

    def greedy(self, rows: Sequence[Row], logits: torch.Tensor, limit: int, stop: Sequence[int]) -> list[list[int]]:
        """Greedy continuations of at most `limit` tokens, without the stop token. Rows grow in place.

        All rows decode together; their tensors are replaced by views of a common one (decoding.py).
        """
        answers: list[list[int]] = [[] for _ in rows]
        slab, running = Slab(rows, limit), list(range(len(rows)))
        for step in range(limit):
            chosen = logits.argmax(-1).tolist()
            kept = [(row, token) for row, token in zip(running, chosen) if token not in stop]
            for row, token in kept:
                answers[row].append(token)
            if not kept or step == limit - 1:
                break
            running = [row for row, _ in kept]
            logits = self.logits(self._decode(slab, running, [token for _, token in kept]))
        return answers

    @torch.inference_mode()
    def _decode(self, slab: Slab, slots: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """The last hidden states [n, hidden] of one more token for each of the slab's rows in `slots`."""
        one = DecodeStep(slab, slots)
        embedded = self.model.model.embed_tokens(torch.tensor(tokens, device=self.model.device))
        hidden = self._forward(embedded, one.positions, one)
        for slot in slots:
            slab.rows[slot].length += 1
        return hidden

    def _embedded(self, piece: Work) -> torch.Tensor:
        """[S, hidden]."""
        if piece.embeddings is not None:
            return piece.embeddings.to(self.model.device)
        return self.model.model.embed_tokens(piece.tokens.to(self.model.device))

    @contextmanager
    def _first_layers(self, count: int | None) -> Iterator[None]:
        """The model's own loop over its layers goes as far as its configuration says."""
        config = self.model.model.config
        whole = config.num_hidden_layers
        config.num_hidden_layers = whole if count is None else count
        try:
            yield
        finally:
            config.num_hidden_layers = whole

    def _forward(self, embedded: torch.Tensor, positions: torch.Tensor, frontier: _Pass | DecodeStep) -> torch.Tensor:
        """The last hidden states [N, hidden] of embeddings [N, hidden] run as one sequence."""
        return self.model.model(
            inputs_embeds=embedded[None], position_ids=positions[None], use_cache=False, frontier=frontier
        ).last_hidden_state[0]


def _attend(module, query, key, value, attention_mask, scaling, frontier, **_):
    """query: [1, query_heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim], key rotated."""
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, heads, head_dim]
    return frontier.attend(module.layer_idx, query, key, value, scaling)[None], None
