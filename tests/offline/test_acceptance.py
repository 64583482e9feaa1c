"""Laws of the acceptance record: four arms that continue the target's own text from four caches."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.errors import CalibrationError, PlanError
from sglang_ext.offline.acceptance import CONTINUATION, Repair, measure, source_block
from sglang_ext.transfer.pack import Acceptance
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import executor, noise_maps, prompts, random_model

LENGTHS = (14, 20, 9)


class Stage:
    """A target, twice: under the executor and as transformers runs it; a source; maps that know nothing."""

    def __init__(self) -> None:
        self.native = random_model("qwen3")
        self.target = executor("qwen3")
        self.source = executor("llama", seed=4, layers=2)
        self.maps = noise_maps(self.source.geometry, self.target.geometry)

    def measure(self, batch: list[list[int]], rho: float, ticks: list | None = None, **repair) -> Acceptance:
        seen = [] if ticks is None else ticks
        chosen = Repair(rho=rho, **repair)
        return measure(self.source, self.target, batch, self.maps, chosen, lambda: seen.append(None))

    @torch.inference_mode()
    def forced(self, ids: list[int], answer: list[int]) -> torch.Tensor:
        """The model's own log-probabilities at each token of `answer` behind `ids`."""
        return self.native(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1].log_softmax(-1)

    @torch.inference_mode()
    def answer(self, ids: list[int]) -> list[int]:
        whole = self.native.generate(torch.tensor([ids]), max_new_tokens=CONTINUATION, do_sample=False)
        return whole[0, len(ids) :].tolist()

    def expected(self, batch: list[list[int]], contexts: list[list[int]]) -> tuple[float, float]:
        """Agreement and KL of the model that sees `contexts` where the target sees `batch`."""
        agree, kl = 0, 0.0
        for ids, context in zip(batch, contexts):
            answer = self.answer(ids)
            native, other = self.forced(ids, answer), self.forced(context, answer)
            agree += int((other.argmax(-1) == torch.tensor(answer)).sum())
            kl += float((native.exp() * (native - other)).sum())
        count = CONTINUATION * len(batch)
        return agree / count, kl / count


@pytest.fixture(scope="module")
def stage():
    return Stage()


@pytest.fixture(scope="module")
def batch():
    return prompts(LENGTHS)


def test_the_target_agrees_with_itself(stage, batch):
    record = stage.measure(batch, 0.3)
    assert record.target.agreement == 1.0
    assert record.target.kl == pytest.approx(0.0, abs=1e-4)


def test_a_full_budget_lifts_to_the_target_whatever_the_map(stage, batch):
    record = stage.measure(batch, 1.0)
    assert record.lifted.agreement == 1.0
    assert record.lifted.kl == pytest.approx(0.0, abs=1e-3)
    assert record.attention_cosine == pytest.approx((1.0,) * 3, abs=1e-3)
    assert record.failure(0.99) is None


def test_a_map_of_noise_without_repair_is_not_accepted(stage, batch):
    record = stage.measure(batch, 0.0)
    assert record.lifted.agreement < 0.7
    assert record.lifted.kl > 0.1
    assert all(cosine < 0.9 for cosine in record.attention_cosine)
    assert record.failure(0.9) is not None


def test_no_context_is_the_prompts_last_token_alone(stage, batch):
    record = stage.measure(batch, 0.3)
    agreement, kl = stage.expected(batch, [ids[-1:] for ids in batch])
    assert record.no_context.agreement == pytest.approx(agreement, abs=1e-4)
    assert record.no_context.kl == pytest.approx(kl, abs=1e-3)
    assert agreement < 0.9


def test_the_wrong_prompt_is_the_next_ones(stage, batch):
    record = stage.measure(batch, 1.0)  # a full budget, so that the lift itself adds nothing
    agreement, kl = stage.expected(batch, [batch[1], batch[2], batch[0]])
    assert record.wrong_prompt.agreement == pytest.approx(agreement, abs=1e-4)
    assert record.wrong_prompt.kl == pytest.approx(kl, abs=1e-3)
    assert agreement < 0.9


def test_prompts_that_are_all_the_same_have_no_wrong_prompt(stage):
    record = stage.measure(prompts((12,)) * 2, 0.3)
    assert record.wrong_prompt == record.lifted
    assert "wrong prompt" in (record.failure(-10.0) or "")


def test_the_record_says_how_it_was_made(stage, batch):
    ticks: list = []
    record = stage.measure(batch, 0.25, ticks)
    assert (record.rho, record.prompts, record.selector) == (0.25, 3, "rank_disagreement")
    assert len(record.attention_cosine) == stage.target.geometry.layers
    assert len(ticks) == 3


def test_it_measures_the_same_each_time(stage, batch):
    assert stage.measure(batch, 0.3) == stage.measure(batch, 0.3)


@pytest.mark.parametrize("selector", ["rank_disagreement", "random", "random:7", "source_attention"])
def test_every_selector_of_the_worker_can_be_measured(stage, batch, selector):
    record = stage.measure(batch, 0.4, selector=selector)
    assert (record.selector, record.rho, record.coverage) == (selector, 0.4, None)
    assert record.target.agreement == 1.0
    assert stage.measure(batch, 1.0, selector=selector).lifted.agreement == 1.0


def test_selectors_repair_different_positions(stage, batch):
    kls = [stage.measure(batch, 0.4, selector=name).lifted.kl for name in ("rank_disagreement", "random:1", "random:2")]
    assert len(set(kls)) == 3


def test_a_coverage_chooses_rho_prompt_by_prompt_and_the_record_says_the_mean(stage, batch):
    nothing, some, all_of_it = (stage.measure(batch, 0.3, coverage=share) for share in (0.0, 0.6, 1.0))
    assert nothing.rho == pytest.approx(sum(1 / len(ids) for ids in batch) / len(batch), abs=1e-4)
    assert nothing.rho < some.rho < all_of_it.rho == 1.0
    assert (some.coverage, some.selector) == (0.6, "rank_disagreement")
    assert all_of_it.lifted.agreement == 1.0


def test_a_block_carries_attention_only_for_the_selector_that_reads_it(stage, batch):
    assert source_block(stage.source, batch[0], "rank_disagreement").attention is None
    attention = source_block(stage.source, batch[0], "source_attention").attention
    assert attention.shape == (len(batch[0]),) and float(attention.sum()) == pytest.approx(1.0, abs=1e-5)


def test_a_selector_that_is_not_known_is_refused_before_anything_runs():
    with pytest.raises(PlanError, match="'gut_feeling' is not known"):
        Repair(selector="gut_feeling")


def test_one_prompt_alone_is_refused(stage, batch):
    with pytest.raises(CalibrationError, match="1 prompts.*at least 2"):
        stage.measure(batch[:1], 0.3)


def test_each_prompt_is_lifted_from_its_own_block(stage, batch):
    """The neighbours stay the same when the list begins elsewhere, and so does every arm."""
    once, again = stage.measure(batch, 0.3), stage.measure([*batch[1:], batch[0]], 0.3)
    for arm in ("lifted", "wrong_prompt", "no_context"):
        assert getattr(again, arm).agreement == getattr(once, arm).agreement
        assert getattr(again, arm).kl == pytest.approx(getattr(once, arm).kl, abs=1e-4)
    assert again.attention_cosine == pytest.approx(once.attention_cosine, abs=2e-4)
