"""Runs prefill plans on a transformers model: the same mathematics as in the worker, without a server.

A `Row` is one prompt's cache, with keys rotated as in a server's pool. Rows of different lengths are
computed in one forward: the model sees their chosen tokens as one sequence with explicit positions,
and only attention, which is ours, knows where one row ends and the next begins.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Sequence

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from sglang_ext.attention import frontier_attention
from sglang_ext.block import KVBlock
from sglang_ext.geometry import KVGeometry
from sglang_ext.identity import ModelIdentity
from sglang_ext.phases import Phases
from sglang_ext.plan import Fill, FillKind, PrefillPlan, native, repaired
from sglang_ext.rope import Rotation
from sglang_ext.transfer.maps import CrossModelMap
from sglang_ext.transfer.selectors import top_positions

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
    """Tokens [S] of one row to run at sorted positions [S]."""

    row: Row
    tokens: torch.Tensor
    positions: torch.Tensor


@dataclass
class _Pass:
    """What attention needs to know about the forward that is running."""

    work: Sequence[Work]
    outputs: list[torch.Tensor] | None = field(default=None)


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
    def compute(self, work: Sequence[Work], outputs: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Runs the work's tokens in one forward and writes their KV into their rows.

        Returns the last hidden states, [S, hidden] per piece of work. `outputs`, where given, receives
        each layer's attention output [sum S, query_heads, head_dim].
        """
        tokens = torch.cat([piece.tokens for piece in work]).to(self.model.device)
        positions = torch.cat([piece.positions for piece in work]).to(self.model.device)
        hidden = self.model.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False,
            frontier=_Pass(work, outputs),
        ).last_hidden_state[0]  # fmt: skip
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
        return rows, self._run(rows, prompts, [native(len(ids)) for ids in prompts])

    def block(self, row: Row, tokens: Sequence[int]) -> KVBlock:
        """The first len(tokens) positions of a row as a position-free block."""
        n = len(tokens)
        return KVBlock.from_rotated(
            tokens, row.keys[:, :n], row.values[:, :n].clone(), self.rotation, self.geometry, self.identity
        )

    def fill_mapped(self, row: Row, block: KVBlock, maps: CrossModelMap, start: int = 0) -> torch.Tensor:
        """Writes a source block through `maps` into a row. Returns the scores s_i: float32 [T]."""

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
            row.keys[layer, start : start + len(block)] = keys.to(row.keys.dtype)
            row.values[layer, start : start + len(block)] = values.to(row.values.dtype)

        return maps.fill(block, start, self.geometry, self.rotation, write, Phases())

    def lift(
        self, prompts: Sequence[Sequence[int]], blocks: Sequence[KVBlock], maps: CrossModelMap, rho: float, spare: int = 0
    ) -> tuple[list[Row], torch.Tensor, list[PrefillPlan]]:
        """RaReCache on a batch: maps each block, recomputes the rho positions of largest score.

        A block may cover only a prefix of its prompt; the rest is computed. Returns rows, the last
        logits [n, V] and the plans.
        """
        rows, plans = [], []
        for ids, block in zip(prompts, blocks):
            row = self.row(len(ids) + spare)
            span = block.span(0, min(len(block), len(ids) - 1))
            scores = self.fill_mapped(row, span, maps)
            fill = Fill(0, len(span), FillKind.MAPPED)
            plans.append(repaired(len(ids), [fill], top_positions(scores, rho)))
            rows.append(row)
        return rows, self._run(rows, prompts, plans), plans

    def _run(self, rows: Sequence[Row], prompts: Sequence[Sequence[int]], plans: Sequence[PrefillPlan]) -> torch.Tensor:
        """Computes what plans say of rows whose fills are done. Returns the last logits [n, V]."""
        hidden = self.compute(
            [Work(row, torch.tensor(ids)[plan.compute], plan.compute) for row, ids, plan in zip(rows, prompts, plans)]
        )
        return self.logits(torch.stack([states[-1] for states in hidden]))

    def greedy(self, rows: Sequence[Row], logits: torch.Tensor, limit: int, stop: Sequence[int]) -> list[list[int]]:
        """Greedy continuations of at most `limit` tokens, without the stop token. Rows grow in place."""
        answers: list[list[int]] = [[] for _ in rows]
        running = list(range(len(rows)))
        for step in range(limit):
            chosen = logits.argmax(-1).tolist()
            kept = [(row, token) for row, token in zip(running, chosen) if token not in stop]
            for row, token in kept:
                answers[row].append(token)
            if not kept or step == limit - 1:
                break
            running = [row for row, _ in kept]
            work = [Work(rows[i], torch.tensor([token]), torch.tensor([rows[i].length])) for i, token in kept]
            logits = self.logits(torch.cat(self.compute(work)))
        return answers


def _attend(module, query, key, value, attention_mask, scaling, frontier, **_):
    """Writes the computed keys and values into their rows and attends over whole rows.

    query: [1, query_heads, N, head_dim]; key, value: [1, kv_heads, N, head_dim], key rotated.
    """
    layer = module.layer_idx
    query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))  # [N, heads, head_dim]
    mixed, at = [], 0
    for piece in frontier.work:
        rows = slice(at, at + len(piece.tokens))
        row, positions = piece.row, piece.positions
        row.keys[layer, positions] = key[rows]
        row.values[layer, positions] = value[rows]
        end = int(positions[-1]) + 1
        mixed.append(
            frontier_attention(query[rows], positions, row.keys[layer, :end], row.values[layer, :end], scaling)
        )
        at = rows.stop
    output = torch.cat(mixed)
    if frontier.outputs is not None:
        frontier.outputs.append(output)
    return output[None], None
