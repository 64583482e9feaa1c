"""Laws of a run: a full budget gives the target's own text, and neither batch, order nor a stop changes a row."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.errors import PackError
from sglang_ext.offline.evaluate.arms import SELECTORS, Arm, arms
from sglang_ext.offline.evaluate.datasets.items import Dataset
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.measures import Answers
from sglang_ext.offline.evaluate.rows import document
from sglang_ext.offline.evaluate.run import Evaluation, Pair
from sglang_ext.offline.evaluate.store import Store, unpacked
from sglang_ext.plan import budget_size
from sglang_ext.transfer.selectors import RANK_DISAGREEMENT
from tests.kv.models import random_model, tokenizer
from tests.offline.evaluate import stage

SOME = arms(SELECTORS, (0.0, 0.3), (0.5,), (0.4,), seeds=2)
FULL = [Arm(selector, 1.0) for selector in SELECTORS]
KL_OF_ROUNDING = 1e-3


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return stage.run(tmp_path_factory.mktemp("found"), [*SOME, *FULL], agreement_rho=0.3)


def texts(results) -> dict:
    own = {arm: [one.text for one in outcomes] for arm, outcomes in results.lifted[0].items()}
    alone = {name: [one.text for one in outcomes] for name, outcomes in results.sources.items()}
    return {**own, **alone, "target": [one.text for one in results.target]}


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_full_budget_gives_the_targets_own_text(found, selector):
    _, results = found
    assert texts(results)[Arm(selector, 1.0)] == texts(results)["target"]


def test_without_a_budget_a_map_of_noise_gives_another_text(found):
    _, results = found
    assert texts(results)[Arm(RANK_DISAGREEMENT)] != texts(results)["target"]


def test_the_target_alone_says_what_transformers_says(found):
    _, results = found
    native = random_model("qwen3", 1, layers=stage.LAYERS, vocabulary=len(tokenizer()))
    native.generation_config.eos_token_id = native.generation_config.pad_token_id = tokenizer().eos_token_id
    for ids, one in zip(results.prompts, results.target):
        inputs = torch.tensor([ids])
        made = native.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=6, do_sample=False)
        assert tokenizer().decode(made[0, len(ids) :], skip_special_tokens=True) == one.text


def test_each_arm_recomputes_what_its_budget_says(found):
    _, results = found
    for arm, outcomes in results.lifted[0].items():
        for ids, one in zip(results.prompts, outcomes):
            assert one.length == len(ids)
            if arm.kind == "layer_prefix":
                assert one.recomputed == ""  # it chooses layers, not positions
            elif arm.coverage is None:
                assert int(unpacked(one.recomputed, one.length).sum()) == budget_size(arm.rho, len(ids)) - 1


def test_seeds_of_random_choose_differently_and_each_the_same_again(found, tmp_path):
    _, results = found
    one, other = (results.lifted[0][Arm(f"random:{seed}", 0.5)] for seed in (0, 1))
    assert all(a.recomputed != b.recomputed for a, b in zip(one, other))
    again = stage.run(tmp_path, [Arm("random:1", 0.5)])[1].lifted[0][Arm("random:1", 0.5)]
    assert again == other


@pytest.mark.parametrize("batch", [1, 2, 64])
def test_batches_change_nothing(found, tmp_path, batch):
    assert texts(stage.run(tmp_path, [*SOME, *FULL], batch=batch)[1]) == texts(found[1])


def test_the_order_of_the_items_changes_no_row(found, tmp_path):
    evaluation, results = stage.run(tmp_path, [*SOME, *FULL], stage.items()[::-1], batch=2, agreement_rho=0.3)
    assert document(evaluation, results) == document(*found)


def test_each_item_may_have_its_own_length(tmp_path):
    mixed = [*stage.items(2, limit=2), *stage.items(4, limit=6)[2:]]
    short = stage.run(tmp_path / "mixed", [Arm(RANK_DISAGREEMENT, 0.5)], mixed)[1].target
    alone = stage.run(tmp_path / "alone", [], mixed[:1])[1].target
    assert short[0] == alone[0]
    ids = tokenizer().encode(short[0].text, add_special_tokens=False)
    assert len(ids) <= 2


def test_a_run_that_was_stopped_goes_on_where_it_was(found, tmp_path):
    ticks: list = []

    class Stop(Exception):
        pass

    class Ticks(list):
        def append(self, tick):
            super().append(tick)
            if tick[0] > 20:
                raise Stop

    with pytest.raises(Stop):
        stage.run(tmp_path, [*SOME, *FULL], ticks=Ticks())
    evaluation, results = stage.run(tmp_path, [*SOME, *FULL], ticks=ticks, agreement_rho=0.3)
    assert ticks[0][0] > 20
    assert ticks[-1][0] == ticks[-1][1]
    assert document(evaluation, results) == document(*found)
    again: list = []
    stage.run(tmp_path, [*SOME, *FULL], ticks=again, agreement_rho=0.3)
    assert again == [(ticks[-1][1], ticks[-1][1])]


def test_other_settings_share_only_what_does_not_depend_on_them(tmp_path):
    stage.run(tmp_path, [Arm(RANK_DISAGREEMENT, 0.3)])
    ticks: list = []
    stage.run(tmp_path, [Arm(RANK_DISAGREEMENT, 0.4)], ticks=ticks)
    assert ticks[0] == (10, 15)  # target and source alone are kept, for five items each
    longer: list = []
    stage.run(tmp_path, [Arm(RANK_DISAGREEMENT, 0.3)], stage.items(limit=7), ticks=longer)
    assert longer[0] == (0, 15)


def test_a_line_that_was_cut_is_dropped_and_counted(tmp_path):
    stage.run(tmp_path, [])
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-9])
    ticks: list = []
    evaluation, _ = stage.run(tmp_path, [], ticks=ticks)
    assert ticks[0] == (8, 10)
    assert evaluation.unfinished == 2
    assert ticks[-1] == (10, 10)


def test_a_kept_line_of_something_else_is_named(tmp_path):
    stage.run(tmp_path, [])
    first = min(tmp_path.iterdir())
    first.write_text(first.read_text() + '{"item": 5}\n')
    with pytest.raises(EvaluationError, match=f"{first.name}:7"):
        stage.run(tmp_path, [])


def test_fidelity_of_a_full_budget_is_exact_and_of_noise_is_not(tmp_path):
    full, none = Arm(RANK_DISAGREEMENT, 1.0), Arm(RANK_DISAGREEMENT)
    evaluation, results = stage.run(tmp_path, [none, full], measure="fidelity")
    found = document(evaluation, results)
    assert found.metric == "agreement"
    assert (found.target.accuracy, found.target.kl) == (1.0, pytest.approx(0, abs=KL_OF_ROUNDING))
    rows = {row.rho: row for row in found.rows}
    assert (rows[1.0].accuracy, rows[1.0].kl) == (1.0, pytest.approx(0, abs=KL_OF_ROUNDING))
    assert rows[0.0].accuracy < 0.9
    assert rows[0.0].kl > 0.1
    assert found.sources["small"].kl > 0.1


def test_the_shared_set_is_each_layers_own_at_a_full_budget_only(tmp_path, found):
    full = document(*stage.run(tmp_path, [Arm(RANK_DISAGREEMENT)], agreement_rho=1.0)).layers[0]
    assert full.rank_disagreement == full.mapping_error == [1.0] * stage.LAYERS
    some = document(*found).layers[0]
    assert all(0 < overlap < 1 for overlap in some.rank_disagreement + some.mapping_error)


def test_a_pack_of_other_models_is_refused(tmp_path):
    turned = Pair(stage.target(), stage.pack(), ())
    with pytest.raises(PackError, match="source"):
        Evaluation(stage.target(), [turned], tokenizer(), Answers(tokenizer()), Store(tmp_path))


def test_a_prompt_of_one_token_is_named(tmp_path):
    [item] = stage.items(1)
    short = type(item)("tiny", "t", {"text": "A"}, item.gold, item.rule, "f1", 4)
    with pytest.raises(EvaluationError, match="'tiny' has 1 tokens"):
        Evaluation(stage.target(), [], tokenizer(), Answers(tokenizer()), Store(tmp_path)).run(
            Dataset("d", (short,), {}), lambda *_: None
        )
