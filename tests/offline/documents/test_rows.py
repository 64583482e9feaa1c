"""What rows say of outcomes: pooled micro-F1, recovery, seeds."""

from __future__ import annotations

import pytest

from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.libraries import NO_CACHE, Arm
from sglang_ext.offline.documents.outcomes import LinkedOutcome
from sglang_ext.offline.documents.rows import rows
from sglang_ext.offline.documents.run import Prompt, Results
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item
from tests.offline.documents import stage

RIGHT, HALF, WRONG = "blue car", "blue bus", "red bus"


@pytest.fixture
def evaluation(tmp_path):
    def made(*arms):
        return stage.run(tmp_path, [stage.plain(*arms)], stage.items(1))[0]

    return made


def outcome(text: str, ttft: float = 1.0, kl: float = 0.0) -> LinkedOutcome:
    return LinkedOutcome(
        item="i", text=text, agree=2, kl=kl, tokens=4, length=10, computed=5, missed=0, ttft_ms=ttft, flops=7
    )


def table(evaluation, texts: dict[Arm, list[str]], tasks: str = "aaaa") -> dict:
    items = [
        Item(str(n), task, {}, (RIGHT,), lambda text, gold: float(text in gold), "accuracy", 5)
        for n, task in enumerate(tasks)
    ]
    arms = {arm: [outcome(text) for text in told] for arm, told in texts.items()}
    ran = evaluation(*[arm for arm in arms if arm not in stage.REFERENCES])
    prompts = [Prompt(item, [1], ((1,),)) for item in items]
    found = rows(ran, Results(Dataset("d", tuple(items), {}), prompts, [arms]))
    return {(row.task, row.method, row.budget): row for row in found}


TEXTS = {Arm(FULL): [RIGHT] * 4, Arm(NO_RECOMPUTE): [RIGHT, WRONG, WRONG, WRONG], Arm(NO_CACHE): [WRONG] * 4}


def test_recovery_is_the_share_of_the_way_from_no_recompute_to_full(evaluation):
    found = table(evaluation, {**TEXTS, Arm("epic", 1.0): [RIGHT, RIGHT, RIGHT, WRONG]})
    assert found["a", "no_recompute", None].recovery_exact == 0
    assert found["a", "full", None].recovery_exact == 1
    assert found["a", "epic", 1.0].recovery_exact == pytest.approx(2 / 3, abs=1e-5)
    assert found["a", "no_cache", None].recovery_exact == pytest.approx(-1 / 3, abs=1e-5)


def test_micro_f1_pools_words_and_exact_match_does_not_see_halves(evaluation):
    found = table(evaluation, {**TEXTS, Arm("epic", 1.0): [RIGHT, HALF, HALF, WRONG]})
    row = found["a", "epic", 1.0]
    assert (row.exact_match, row.micro_f1) == (0.25, 0.5)
    assert row.recovery == pytest.approx((0.5 - 0.25) / 0.75, abs=1e-5)


def test_recovery_is_unknown_where_there_is_nothing_to_recover(evaluation):
    found = table(evaluation, {**TEXTS, Arm(NO_RECOMPUTE): [RIGHT] * 4})
    assert {row.recovery for row in found.values()} == {None}


def test_each_task_has_its_rows(evaluation):
    found = table(evaluation, TEXTS, tasks="abab")
    assert found["a", "no_recompute", None].exact_match == 0.5
    assert found["b", "no_recompute", None].exact_match == 0.0
    assert found["b", "full", None].n == 2


def test_seeds_are_one_row_of_their_mean(evaluation):
    seeds = {Arm("random:0", 0.5): [RIGHT] * 4, Arm("random:1", 0.5): [RIGHT, RIGHT, WRONG, WRONG]}
    row = table(evaluation, {**TEXTS, **seeds})["a", "random", 0.5]
    assert row.seeds == [1.0, 0.5]
    assert row.exact_match == 0.75
    assert row.n == 4


def test_a_method_without_budget_shows_none(evaluation):
    found = table(evaluation, TEXTS)
    assert {budget for _, _, budget in found} == {None}
    assert found["a", "full", None].p_vs_full is None
    assert found["a", "no_cache", None].p_vs_full == pytest.approx(0.125)
