"""Laws of the transformers executor: whatever its plan, it computes what the model itself would."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from sglang_ext.attention import LAST_QUERIES
from sglang_ext.errors import PlanError
from sglang_ext.offline.executor import Probe, TransformersExecutor, Work
from sglang_ext.plan import FillKind
from sglang_ext.transfer.fit import MapFitter
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT, Coverage, Fraction, scorer_named
from tests.kv.builders import one_thread, random_block  # noqa: F401
from tests.kv.models import KINDS, executor, noise_maps, prompts, random_model

LENGTHS = (23, 1, 9, 40)
CLOSE = {"rtol": 0, "atol": 1e-3}
SCORER = scorer_named(RANK_DISAGREEMENT)


class Pair:
    """A model as transformers runs it, and the same weights under the executor."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.native = random_model(kind)
        self.ours = executor(kind)
        self.source = executor("qwen3", seed=7, layers=2, kv_heads=1)
        self.maps = noise_maps(self.source.geometry, self.ours.geometry)

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """The model's own, of every position."""
        return self.native(torch.tensor([ids])).logits[0]

    @torch.inference_mode()
    def cache(self, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own keys (rotated) and values: [layers, T, kv_heads, head_dim]."""
        cache = DynamicCache()
        self.native(torch.tensor([ids]), past_key_values=cache, use_cache=True)
        keys = torch.stack([layer.keys[0].transpose(0, 1) for layer in cache.layers])
        return keys, torch.stack([layer.values[0].transpose(0, 1) for layer in cache.layers])

    @torch.inference_mode()
    def text(self, ids: list[int], limit: int) -> list[int]:
        inputs = torch.tensor([ids])
        made = self.native.generate(
            inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=limit, do_sample=False
        )
        return made[0, len(ids) :].tolist()

    def block(self, ids: list[int]):
        """The source's block of a prompt."""
        [row], _ = self.source.prefill([ids])
        return self.source.block(row, ids)

    def lift(self, ids: list[int], block, rho: float, spare: int = 0):
        rows, logits, [plan] = self.ours.lift([ids], [block], self.maps, SCORER, Fraction(rho), spare)
        return rows, logits, plan


@pytest.fixture(scope="module", params=KINDS)
def pair(request):
    return Pair(request.param)


@pytest.fixture(scope="module")
def qwen():
    return Pair("qwen3")


def own_map(ours: TransformersExecutor):
    """The map of a model onto itself, fitted on its own KV: the identity."""
    g = ours.geometry
    fitter = MapFitter(g, g)
    for row, ids in zip(ours.prefill(corpus := prompts((60, 50, 40, 50), seed=3))[0], corpus):
        block = ours.block(row, ids)
        fitter.add(block, block, torch.arange(len(ids)))
    return fitter.solve(k=1, rank=g.width, ridge=1e-6, dtype=torch.float32).maps


def test_prefill_gives_the_models_own_logits(pair):
    for ids in prompts(LENGTHS):
        _, logits = pair.ours.prefill([ids])
        torch.testing.assert_close(logits[0], pair.logits(ids)[-1], **CLOSE)


def test_every_hidden_state_is_the_models_own(pair):
    [ids] = prompts((17,))
    row = pair.ours.row(len(ids))
    [hidden] = pair.ours.compute([Work(row, torch.tensor(ids), torch.arange(len(ids)))])
    torch.testing.assert_close(pair.ours.logits(hidden), pair.logits(ids), **CLOSE)


def test_a_batch_of_different_lengths_gives_what_single_prompts_give(pair):
    batch = prompts(LENGTHS)
    rows, logits = pair.ours.prefill(batch)
    for ids, row, one in zip(batch, rows, logits):
        [alone], [expected] = pair.ours.prefill([ids])
        torch.testing.assert_close(one, expected, **CLOSE)
        torch.testing.assert_close(row.keys, alone.keys, **CLOSE)
        torch.testing.assert_close(row.values, alone.values, **CLOSE)
        assert row.length == len(ids)


def test_greedy_text_is_the_models_own(pair):
    batch = prompts((5, 30, 12))
    rows, logits = pair.ours.prefill(batch, spare=16)
    assert pair.ours.greedy(rows, logits, 16, stop=[]) == [pair.text(ids, 16) for ids in batch]


def test_greedy_text_ends_before_its_stop_token_and_others_go_on(qwen):
    batch = prompts((5, 30, 12))
    whole = [qwen.text(ids, 12) for ids in batch]
    stop = whole[1][4]
    rows, logits = qwen.ours.prefill(batch, spare=12)
    cut = [text[: text.index(stop)] if stop in text else text for text in whole]
    assert qwen.ours.greedy(rows, logits, 12, stop=[stop]) == cut
    assert len(cut[1]) <= 4 and max(map(len, cut)) == 12


def test_the_rows_hold_the_models_own_cache(pair):
    [ids] = prompts((33,))
    [row], _ = pair.ours.prefill([ids], spare=3)
    keys, values = pair.cache(ids)
    torch.testing.assert_close(row.keys[:, : len(ids)], keys, **CLOSE)
    torch.testing.assert_close(row.values[:, : len(ids)], values, **CLOSE)
    assert not row.keys[:, len(ids) :].any() and not row.values[:, len(ids) :].any()


def test_a_block_rotated_again_is_the_models_own_cache(pair):
    [ids] = prompts((33,))
    [row], _ = pair.ours.prefill([ids])
    block = pair.ours.block(row, ids)
    keys, values = pair.cache(ids)
    for layer in range(pair.ours.geometry.layers):
        torch.testing.assert_close(block.keys_at(layer, 0, pair.ours.rotation), keys[layer], **CLOSE)
    torch.testing.assert_close(block.values, values, **CLOSE)
    assert block.tokens.tolist() == ids
    assert (block.identity, block.geometry) == (pair.ours.identity, pair.ours.geometry)


def test_a_first_layers_block_is_the_same_at_every_position(pair):
    """Keys without rotation hold no position: the model's own keys of one token differ by rotation alone."""
    ids = [5] * 30
    [row], _ = pair.ours.prefill([ids])
    first = pair.ours.block(row, ids).keys[0]
    torch.testing.assert_close(first, first[:1].expand_as(first), rtol=0, atol=1e-4)
    assert not torch.allclose(row.keys[0, 0], row.keys[0, 20], atol=1e-1)


def test_a_block_of_fewer_tokens_is_the_rows_beginning_and_outlives_it(qwen):
    [ids] = prompts((20,))
    [row], _ = qwen.ours.prefill([ids])
    whole, part = qwen.ours.block(row, ids), qwen.ours.block(row, ids[:8])
    torch.testing.assert_close(part.keys, whole.keys[:, :8], rtol=0, atol=0)
    kept = part.values.clone()
    row.values.zero_()
    row.keys.zero_()
    assert torch.equal(part.values, kept) and bool(part.keys.any())


@pytest.mark.parametrize("cut", [1, 13, 28])
def test_a_prefill_in_two_pieces_gives_what_one_gives(pair, cut):
    [ids] = prompts((29,))
    [whole], [expected] = pair.ours.prefill([ids])
    row, tokens, positions = pair.ours.row(len(ids)), torch.tensor(ids), torch.arange(len(ids))
    pair.ours.compute([Work(row, tokens[:cut], positions[:cut])])
    assert row.length == cut
    [hidden] = pair.ours.compute([Work(row, tokens[cut:], positions[cut:])])
    torch.testing.assert_close(pair.ours.logits(hidden[-1]), expected, **CLOSE)
    torch.testing.assert_close(row.keys, whole.keys, **CLOSE)


def test_pieces_of_several_rows_at_different_depths_share_a_forward(pair):
    first, second = prompts((29, 18))
    (one, other), expected = pair.ours.prefill([first, second])
    a, b = pair.ours.row(29), pair.ours.row(18)
    pair.ours.compute([Work(a, torch.tensor(first[:11]), torch.arange(11))])
    hidden = pair.ours.compute(
        [Work(b, torch.tensor(second), torch.arange(18)), Work(a, torch.tensor(first[11:]), torch.arange(11, 29))]
    )
    torch.testing.assert_close(pair.ours.logits(torch.stack([hidden[1][-1], hidden[0][-1]])), expected, **CLOSE)
    torch.testing.assert_close(a.values, one.values, **CLOSE)
    torch.testing.assert_close(b.values, other.values, **CLOSE)


def test_positions_recomputed_over_their_own_kv_change_nothing(pair):
    """Frontier-causal attention over a right cache: any subset comes out as it was."""
    [ids] = prompts((30,))
    [row], [expected] = pair.ours.prefill([ids])
    before = row.keys.clone(), row.values.clone()
    chosen = torch.tensor([0, 3, 4, 11, 20, 29])
    for where in (row.keys, row.values):
        where[:, chosen] = 99.0
    [hidden] = pair.ours.compute([Work(row, torch.tensor(ids)[chosen], chosen)])
    torch.testing.assert_close(pair.ours.logits(hidden[-1]), expected, **CLOSE)
    torch.testing.assert_close(row.keys, before[0], **CLOSE)
    torch.testing.assert_close(row.values, before[1], **CLOSE)


def test_attention_outputs_are_given_layer_by_layer(qwen):
    [ids] = prompts((6,))
    probe = Probe()
    qwen.ours.compute([Work(qwen.ours.row(6), torch.tensor(ids), torch.arange(6))], probe)
    assert [tuple(one.shape) for one in probe.outputs] == [(6, 4, 16)] * 3
    [row], _ = qwen.ours.prefill([ids])
    # The first position sees itself alone: its output is its own value, in every query head of the group.
    for layer, one in enumerate(probe.outputs):
        torch.testing.assert_close(one[0], row.values[layer, 0].repeat_interleave(2, 0), **CLOSE)


def test_a_full_budget_gives_the_native_logits_whatever_the_map(pair):
    for ids in prompts(LENGTHS):
        rows, logits, plan = pair.lift(ids, pair.block(ids), 1.0, spare=8)
        torch.testing.assert_close(logits[0], pair.logits(ids)[-1], **CLOSE)
        assert plan.compute.tolist() == list(range(len(ids)))
        assert pair.ours.greedy(rows, logits, 8, stop=[]) == [pair.text(ids, 8)]


def test_the_map_matters_below_a_full_budget(pair):
    [ids] = prompts((30,))
    _, logits, _ = pair.lift(ids, pair.block(ids), 0.2)
    assert not torch.allclose(logits[0], pair.logits(ids)[-1], atol=0.1)


def test_a_model_lifted_onto_itself_gives_its_native_text(pair):
    maps = own_map(pair.ours)
    for ids in prompts((31, 12), seed=5):
        [row], _ = pair.ours.prefill([ids])
        rows, logits, [plan] = pair.ours.lift([ids], [pair.ours.block(row, ids)], maps, SCORER, Fraction(0.0), spare=16)
        assert plan.compute.tolist() == [len(ids) - 1]
        torch.testing.assert_close(logits[0], pair.logits(ids)[-1], rtol=0, atol=1e-2)
        assert pair.ours.greedy(rows, logits, 16, stop=[]) == [pair.text(ids, 16)]


@pytest.mark.parametrize("rho", [0.0, 0.3, 0.7])
def test_a_lift_writes_mapped_entries_where_it_does_not_compute(pair, rho):
    [ids] = prompts((30,))
    block = pair.block(ids)
    [row], _, plan = pair.lift(ids, block, rho)
    bare = pair.ours.row(len(ids))
    scores = pair.ours.fill_mapped(bare, block.span(0, len(ids) - 1), pair.maps).sum(0)
    assert torch.equal(row.keys[:, plan.filled], bare.keys[:, plan.filled])
    assert torch.equal(row.values[:, plan.filled], bare.values[:, plan.filled])
    assert not torch.allclose(row.values[-1, plan.compute], bare.values[-1, plan.compute], atol=1e-2)
    assert [fill.kind for fill in plan.fills] == [FillKind.MAPPED]
    # The budget and its choice: the highest scores, and the last position.
    assert len(plan.compute) == {0.0: 1, 0.3: 9, 0.7: 21}[rho]
    lowest = scores[plan.compute[:-1]].min() if len(plan.compute) > 1 else torch.inf
    assert bool((scores[plan.filled] <= lowest).all())
    assert row.length == len(ids)


@pytest.mark.parametrize("covered", [1, 11, 28])
def test_a_block_of_a_prefix_fills_that_prefix_and_the_rest_is_computed(pair, covered):
    [ids] = prompts((29,))
    block = pair.block(ids).span(0, covered)
    [row], logits, plan = pair.lift(ids, block, 0.0, spare=4)
    assert plan.filled.tolist() == list(range(covered))
    assert plan.compute.tolist() == list(range(covered, 29))
    # The same by hand: mapped entries first, then an ordinary prefill of the rest behind them.
    other = pair.ours.row(29)
    pair.ours.fill_mapped(other, block, pair.maps)
    [hidden] = pair.ours.compute([Work(other, torch.tensor(ids[covered:]), torch.arange(covered, 29))])
    torch.testing.assert_close(logits[0], pair.ours.logits(hidden[-1]), **CLOSE)
    torch.testing.assert_close(row.keys[:, :29], other.keys, **CLOSE)


@pytest.mark.parametrize("rho", [0.0, 0.4, 1.0])
def test_a_batch_of_lifts_gives_what_single_lifts_give(pair, rho):
    batch = prompts(LENGTHS)
    blocks = [pair.block(ids) for ids in batch]
    blocks[0] = blocks[0].span(0, 10)
    rows, logits, plans = pair.ours.lift(batch, blocks, pair.maps, SCORER, Fraction(rho), spare=6)
    texts = pair.ours.greedy(rows, logits, 6, stop=[])
    for number, (ids, block) in enumerate(zip(batch, blocks)):
        alone, expected, plan = pair.lift(ids, block, rho, spare=6)
        torch.testing.assert_close(logits[number], expected[0], **CLOSE)
        assert torch.equal(plans[number].compute, plan.compute)
        assert texts[number] == pair.ours.greedy(alone, expected, 6, stop=[])[0]


def test_a_block_longer_than_the_prompt_is_cut_before_the_last_position(qwen):
    [ids] = prompts((20,))
    block = qwen.block(ids)
    _, logits, plan = qwen.lift(ids[:12], block, 0.0)
    _, expected, _ = qwen.lift(ids[:12], block.span(0, 11), 0.0)
    assert plan.filled.tolist() == list(range(11))
    assert torch.equal(logits, expected)


def test_a_prompt_of_one_token_is_computed(qwen):
    [ids] = prompts((1,))
    _, logits, plan = qwen.lift(ids, qwen.block(ids), 0.3)
    assert plan.compute.tolist() == [0] and len(plan.filled) == 0
    torch.testing.assert_close(logits[0], qwen.logits(ids)[-1], **CLOSE)


@pytest.mark.parametrize("rho", [-0.1, 1.1, float("nan")])
def test_a_budget_outside_zero_to_one_is_refused(qwen, rho):
    [ids] = prompts((9,))
    with pytest.raises(PlanError, match="rho"):
        qwen.lift(ids, qwen.block(ids), rho)


def test_a_damaged_block_is_refused_before_the_model_runs(qwen):
    block = random_block(qwen.source.geometry, 9)
    block.values[1, 3, 0, 0] = torch.nan
    with pytest.raises(PlanError, match="NaN or infinite"):
        qwen.lift(prompts((10,))[0], block, 0.3)


def test_nothing_keeps_gradients(qwen):
    [row], logits = qwen.ours.prefill(prompts((4,)))
    assert not (row.keys.requires_grad or row.values.requires_grad or logits.requires_grad)


@pytest.mark.parametrize("length", [5, LAST_QUERIES, 50])
def test_the_attention_received_is_what_the_models_last_queries_give(pair, length):
    [ids] = prompts((length,))
    [row], _ = pair.ours.prefill([ids])
    before = row.keys.clone()
    received = pair.ours.attention_received(row, ids)
    eager = random_model(pair.kind)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        weights = eager(torch.tensor([ids]), output_attentions=True).attentions  # per layer [1, heads, T, T]
    expected = weights[-1][0, :, -LAST_QUERIES:].mean((0, 1))  # three layers: the last quarter is the last one
    torch.testing.assert_close(received, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(received.sum(), torch.tensor(1.0))
    torch.testing.assert_close(row.keys, before, **CLOSE)


@pytest.mark.parametrize("selector", ["random:3", "source_attention"])
def test_every_selector_computes_its_own_choice_and_gives_native_logits_at_a_full_budget(pair, selector):
    [ids] = prompts((30,))
    [row], _ = pair.source.prefill([ids])
    block = pair.source.block(row, ids, pair.source.attention_received(row, ids))
    scorer = scorer_named(selector)
    _, _, [plan] = pair.ours.lift([ids], [block], pair.maps, scorer, Fraction(0.3))
    span = block.span(0, 29)
    assert set(plan.compute[:-1].tolist()) == set(scorer(span, torch.zeros(3, 29)).topk(8).indices.tolist())
    _, logits, _ = pair.ours.lift([ids], [block], pair.maps, scorer, Fraction(1.0))
    torch.testing.assert_close(logits[0], pair.logits(ids)[-1], **CLOSE)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_coverage_is_a_budget_like_any_other(pair, share):
    [ids] = prompts((30,))
    block = pair.block(ids)
    _, logits, [plan] = pair.ours.lift([ids], [block], pair.maps, SCORER, Coverage(share))
    scores = pair.ours.fill_mapped(pair.ours.row(30), block.span(0, 29), pair.maps).sum(0)
    assert float(scores[plan.compute[:-1]].sum()) >= share * float(scores.sum()) * (1 - 1e-6)
    if share == 1.0:  # every token of random text has some energy outside
        torch.testing.assert_close(logits[0], pair.logits(ids)[-1], **CLOSE)
