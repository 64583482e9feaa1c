"""Runs chosen positions of several prompts through SGLang's model in one forward.

The forward is an ordinary extend whose tokens happen not to be neighbours. What makes it right is the
attention backend: RadixAttention asks the ambient context for it at each call, so ours needs no
registration and no command-line choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Iterator, NamedTuple, Sequence

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from sglang_ext.attention import LAST_QUERIES, frontier_attention
from sglang_ext.geometry import KVGeometry
from sglang_ext.worker.ahead import LayersAhead
from sglang_ext.worker.ops import Attention, KVOps

_SPARE_ROW = 0  # of SGLang's request table: the one that no request ever gets


def soft_token(row: int) -> int:
    """The token that stands for row `row` of a work's `soft` embeddings: negative, as no id is."""
    return -1 - row


@dataclass(frozen=True)
class Work:
    """Positions of one prompt to compute.

    tokens, positions: int64 [S] on the CPU, positions sorted; slots: int64 [n] on the pool's device, the slot
    of every position of the prompt up to the last one that is computed or read; into: where the computed KV
    goes, int64 [S], by default the positions' own slots; fill: writes one more layer's filled entries each time
    it is advanced, as long as they are not all in the pool; soft: float [k, hidden], the embeddings that soft
    tokens (`soft_token`) stand for.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    into: torch.Tensor | None = None
    fill: Iterator[Any] | None = None
    soft: torch.Tensor | None = None

    @property
    def target(self) -> torch.Tensor:
        return self.slots[self.positions] if self.into is None else self.into


class Computed(NamedTuple):
    """How many forwards it took; of each piece of work, the logits of its last position, [vocabulary]."""

    forwards: int
    logits: list[torch.Tensor]


@dataclass
class _Probe:
    """Collects, from layer `first` on, the attention that each position of a lone piece of work receives."""

    first: int
    received: list[torch.Tensor] = field(default_factory=list)


class SGLangExecutor:
    """Computes work on one scheduler's model runner. Writes the pool, touches nothing else."""

    def __init__(self, model_runner: Any, geometry: KVGeometry, ops: KVOps, max_tokens: int) -> None:
        self._runner = model_runner
        self._group = geometry.query_heads // geometry.kv_heads
        self._ops = ops
        self._max_tokens = max_tokens

    def compute(self, work: Sequence[Work]) -> Computed:
        """Writes the KV of every position of `work` into its slot.

        In as many forwards as the token limit asks for. Splitting one prompt by ascending position is exact: a position
        needs only earlier ones.
        """
        batches: list[list[tuple[int, Work]]] = []
        room = 0
        for index, piece in _cut(work, self._max_tokens):
            if len(piece.tokens) > room or not batches:
                batches.append([])
                room = self._max_tokens
            batches[-1].append((index, piece))
            room -= len(piece.tokens)
        last: dict[int, torch.Tensor] = {}
        for batch in batches:
            logits = self._repair([piece for _, piece in batch], None)
            # A prompt's later piece comes after its earlier ones.
            last |= {index: row for (index, _), row in zip(batch, logits, strict=True)}
        return Computed(len(batches), [last[index].clone() for index in range(len(work))])

    def attention_received(self, tokens: torch.Tensor, slots: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """The attention that each position of a cached prefix received: float32 [n], summing to 1.

        Of the last 32 queries, averaged over the last quarter of the layers, as `TransformersExecutor` does.
        tokens: int64 [n] on the CPU; slots: int64 [n]. Those queries run again, and what KV they give goes to
        `scratch`, int64 [at least 32]: the prefix's own slots are only read.
        """
        positions = torch.arange(max(0, len(tokens) - LAST_QUERIES), len(tokens))
        layers = self._runner.token_to_kv_pool.layer_num
        probe = _Probe(first=layers - max(1, layers // 4))
        self._repair([Work(tokens[positions], positions, slots, into=scratch[: len(positions)])], probe)
        return torch.stack(probe.received).mean(0)

    def prefill(self, tokens: torch.Tensor, slots: torch.Tensor) -> None:
        """A native prefill of one prompt through SGLang's own attention, for measuring its time.

        tokens: int64 [n] on the CPU; slots: int64 [n]. Writes their KV and borrows the request table's spare row.
        """
        table = self._runner.req_to_token_pool.req_to_token
        table[_SPARE_ROW, : len(slots)] = slots.to(table.dtype)
        try:
            self._runner.forward(self._batch([Work(tokens, torch.arange(len(tokens)), slots)]))
        finally:
            table[_SPARE_ROW, : len(slots)] = 0

    def _repair(self, work: Sequence[Work], probe: _Probe | None) -> torch.Tensor:
        """Returns the logits of each piece's last position, [len(work), vocabulary]."""
        batch = self._batch(work)
        # Our backend plans nothing, and SGLang's own must not plan for a batch it will not see.
        batch.mark_forward_metadata_ready()
        fills = [one.fill for one in work if one.fill is not None]
        attention = self._ops.attention([one.positions for one in work], [one.slots for one in work], self._group)
        backend = _FrontierBackend(self._runner, attention, LayersAhead(fills, work[0].slots.device), probe)
        with forward_context(ForwardContext(attn_backend=backend)):
            output = self._runner.forward(batch)
        return output.logits_output.next_token_logits

    def _batch(self, work: Sequence[Work]) -> ForwardBatch:
        runner = self._runner
        device = runner.device
        counts = [len(piece.tokens) for piece in work]
        lengths = torch.tensor(counts, dtype=torch.int64)
        total = sum(counts)
        tokens = torch.cat([piece.tokens for piece in work])
        soft, embeds = _soft_places(tokens, work)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(work),
            input_ids=tokens.clamp_min(0).to(device),
            replace_positions=None if soft is None else soft.to(device),
            replace_embeds=None if embeds is None else embeds.to(device),
            req_pool_indices=torch.full((len(work),), _SPARE_ROW, dtype=torch.int64, device=device),
            seq_lens=lengths.to(device),
            seq_lens_cpu=lengths,
            orig_seq_lens=lengths.to(device, torch.int32),
            seq_lens_sum=total,
            out_cache_loc=torch.cat([piece.target for piece in work]),
            positions=torch.cat([piece.positions for piece in work]).to(device),
            extend_num_tokens=total,
            extend_seq_lens=lengths.to(device, torch.int32),
            extend_seq_lens_cpu=counts,
            extend_prefix_lens=torch.zeros(len(work), dtype=torch.int32, device=device),
            extend_prefix_lens_cpu=[0] * len(work),
            extend_start_loc=(lengths.cumsum(0) - lengths).to(device, torch.int32),
            extend_logprob_start_lens_cpu=counts,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            global_num_token_non_padded_cpu=total,
            spec_algorithm=runner.spec_algorithm,
            mm_inputs=[None] * len(work),
            lora_ids=[None] * len(work),
            is_prefill_only=True,
        )
        runner.kv_index_translator.own_plan(batch).bind(batch, runner.kv_index_translator)
        return batch


def _cut(work: Sequence[Work], limit: int) -> list[tuple[int, Work]]:
    """Pieces of at most `limit` tokens, each prompt's in ascending order of position, with its index."""
    return [
        (index, replace(piece, tokens=piece.tokens[at : at + limit], positions=piece.positions[at : at + limit]))
        for index, piece in enumerate(work)
        for at in range(0, len(piece.tokens), limit)
    ]


def _soft_places(tokens: torch.Tensor, work: Sequence[Work]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Where in the batch soft tokens are, int64 [k], and their embeddings [k, hidden]; None where there are none."""
    places = torch.nonzero(tokens < 0).flatten()
    if not len(places):
        return None, None
    rows = [piece.soft[-1 - piece.tokens[piece.tokens < 0]] for piece in work if piece.soft is not None]
    return places, torch.cat(rows)


class _FrontierBackend(AttentionBackend):
    """Frontier-causal attention over the paged pool, for one forward."""

    def __init__(self, runner: Any, attention: Attention, ahead: LayersAhead, probe: _Probe | None) -> None:
        super().__init__()
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.req_to_token_pool = runner.req_to_token_pool
        self.kv_index_translator = runner.kv_index_translator
        self._attention = attention
        self._ahead = ahead
        self._probe = probe

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **_):
        self._ahead.reach_layer()
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        received = self._probe.received if self._probe is not None and layer.layer_id >= self._probe.first else None
        return self._attention(query, keys, values, layer.scaling, received).reshape(query.shape[0], -1)


def extend_with_frontier(
    original, self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
    extend_prefix_lens, extend_seq_lens, encoder_lens=None, scaling=None, enable_gqa=False,
    causal=False, is_cross_attn=False, sliding_window_size=None,
):  # fmt: skip
    """AROUND hook for the torch-native backend's extend: the same attention, without its waste.

    That backend pads the queries of an extend to the whole sequence, so that one token behind a prefix
    of T costs T^2. A prompt whose prefix is cached, lifted or not, would pay for a full prefill's
    attention; here it pays for its own queries. What is not plain causal attention stays as it was.
    """
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if not causal or is_cross_attn or encoder_lens is not None or windowed:
        return original(
            self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal,
            is_cross_attn, sliding_window_size,
        )  # fmt: skip
    at = 0
    rows = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist())
    for row, length, prefix, count in rows:
        slots = req_to_token[row, :length].to(torch.int64)
        positions = torch.arange(prefix, prefix + count, device=query.device)
        output[at : at + count] = frontier_attention(
            query[at : at + count], positions, k_cache.index_select(0, slots), v_cache.index_select(0, slots), scaling
        )
        at += count
    return output
