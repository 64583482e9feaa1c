"""Attention deviation is 0 for the full prefill, 1 for no recompute, and its weights are the model's own."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.link import link
from sglang_ext.documents.planners import planner_named
from sglang_ext.offline.documents.attention import Deviation, measure, weights_on_documents
from sglang_ext.offline.documents.cache import LinkedCache
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import executor, prompts, random_model
from tests.offline.documents import stage


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_weights_of_a_full_prefill_are_those_of_the_model_itself(kind):
    model, native = executor(kind), random_model(kind)
    native.set_attn_implementation("eager")
    before, first, between, second, query = prompts((4, 7, 3, 5, 6))
    documents = Compiler(model).compile([first, second])
    cache = LinkedCache(model, link([before, documents[0], between, documents[1], query]))
    cache.prefill(planner_named("full", 0))
    with torch.inference_mode():
        ids = torch.tensor([before + first + between + second + query])
        own = torch.stack([layer[0] for layer in native(ids, output_attentions=True).attentions])
    for found, span in zip(weights_on_documents(cache), (slice(4, 11), slice(14, 19)), strict=True):
        expected = own[:, :, 19:, span].transpose(1, 2)  # [layers, queries, heads, n]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_headers_weights_are_not_its_documents():
    model = executor("qwen3")
    text, query = prompts((7, 4))
    cache = LinkedCache(model, link([*Compiler(model).compile([text]), query]))
    cache.prefill(planner_named("no_recompute", 0))
    [found] = weights_on_documents(cache)
    assert found.shape == (3, 4, 4, 7)
    assert float(found.sum(-1).max()) < 1


def uniform(tokens: int) -> torch.Tensor:
    return torch.full((2, 3, 4, tokens), 0.01)


def test_regions_are_the_first_tenth_and_the_interior():
    found, own, full = Deviation(), uniform(20), uniform(20)
    own[..., :2] += 0.5  # j / n < 0.1
    own[..., 2:18] += 0.25  # < 0.9
    own[..., 18:] += 7.0  # neither
    found.add(own, full)
    assert found.pre.mean == pytest.approx(0.5)
    assert found.interior.mean == pytest.approx(0.25)


def test_every_document_counts_once_whatever_its_length():
    found = Deviation()
    for tokens, apart in ((10, 0.1), (100, 0.3)):
        found.add(uniform(tokens) + apart, uniform(tokens))
    assert found.interior.mean == pytest.approx(0.2)


def test_even_attention_has_no_peak_and_a_first_token_has_its_own():
    even, peaked, own = Deviation(), Deviation(), uniform(20)
    even.add(uniform(20), uniform(20))
    own[..., 0] *= 50
    peaked.add(own, uniform(20))
    assert even.peaks == pytest.approx([1.0] * 8)
    assert peaked.peaks == pytest.approx([50.0, *[1.0] * 7])


def test_the_interiors_density_weighs_documents_by_their_width():
    """Density 1 over 8 interior tokens of 10, 3 over 80 of 100: 248 / 88."""
    found, short, long = Deviation(), torch.ones(1, 1, 1, 10), torch.full((1, 1, 1, 100), 3.0)
    for own in (short, long):
        found.add(own, own)
    assert found.peaks[0] == pytest.approx(2 / (248 / 88))


def test_short_documents_have_as_many_peaks_as_tokens():
    found = Deviation()
    found.add(uniform(3), uniform(3))
    assert len(found.peaks) == 3


def test_no_recompute_is_one_by_definition_and_counts_every_prompt(tmp_path):
    ticks: list = []
    evaluation, results = stage.run(tmp_path, [stage.plain()])
    [row] = measure(evaluation, results.prompts, "task", lambda: ticks.append(1))
    assert (row.method, row.r_pre, row.r_int, row.n) == ("no_recompute", 1.0, 1.0, 4)
    assert len(ticks) == 4 and len(row.peaks) > 1
