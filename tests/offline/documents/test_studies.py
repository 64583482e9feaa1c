"""A study's arms: the references always, each rule at its own budgets, mapped documents against random."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.libraries import NO_CACHE, Arm
from sglang_ext.offline.documents.studies import Study, pack_and_source, preset
from sglang_ext.offline.evaluate.datasets import load
from sglang_ext.offline.evaluate.errors import EvaluationError

REFERENCES = (Arm(FULL), Arm(NO_RECOMPUTE), Arm(NO_CACHE))


def test_the_references_are_always_run():
    assert Study("m", ("d",), rules=()).plain_arms == REFERENCES


def test_epic_counts_tokens_and_the_others_shares():
    study = Study("m", ("d",), rules=("epic", "a3"), shares=(0.1, 0.9), leading=(10.0, 30.0))
    assert study.plain_arms[3:] == (Arm("epic", 10.0), Arm("epic", 30.0), Arm("a3", 0.1), Arm("a3", 0.9))


def test_each_seed_of_random_is_an_arm():
    study = Study("m", ("d",), rules=("random",), shares=(0.1,), map_shares=(0.0, 0.3), seeds=2)
    assert study.plain_arms[3:] == (Arm("random:0", 0.1), Arm("random:1", 0.1))
    mapped = [(arm.planner, arm.budget) for arm in study.mapped_arms]
    # Without a budget there is nothing to choose: random would measure the same again.
    assert mapped == [("rank_disagreement", 0.0), ("rank_disagreement", 0.3), ("random:0", 0.3), ("random:1", 0.3)]


def test_the_papers_budgets_are_the_defaults():
    budgets: dict[str, set] = {}
    for arm in Study("m", ("d",)).plain_arms[3:]:
        budgets.setdefault(arm.kind, set()).add(arm.budget)
    shares = {0.1, 0.3, 0.5, 0.7, 0.9}
    assert budgets == {"epic": {10, 30, 50, 70, 90}, "random": shares, "cache_blend": shares, "a3": shares}


@pytest.mark.parametrize("rule", ["magic", "rank_disagreement", "full"])
def test_a_rule_that_plain_documents_do_not_have_is_refused(rule):
    with pytest.raises(EvaluationError, match="is not known"):
        Study("m", ("d",), rules=(rule,))


def test_a_pack_is_given_with_its_source():
    assert pack_and_source("p=s") == ("p", "s")
    for text in ("p", "=s", "p="):
        with pytest.raises(EvaluationError, match="PACK_FOLDER=SOURCE_MODEL"):
            pack_and_source(text)


def test_every_dataset_and_pack_of_the_preset_is_there():
    plan = preset("tiny", 1)
    assert all(load(name).items for study in plan.studies for name in study.data)
    assert all((Path(folder) / "pack.json").exists() for study in plan.studies for folder, _ in study.packs)
    with pytest.raises(EvaluationError, match="expected tiny"):
        preset("huge", 1)
