"""Laws of the acceptance record: four arms that continue the target's own text from four caches."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.offline.acceptance import CONTINUATION, measure
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

    def measure(self, batch: list[list[int]], rho: float, ticks: list | None = None) -> Acceptance:
        blocks = [self.source.block(row, ids) for row, ids in zip(self.source.prefill(batch)[0], batch)]
        seen = [] if ticks is None else ticks
        return measure(self.target, batch, blocks, self.maps, rho, lambda: seen.append(None))

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
