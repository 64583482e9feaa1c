"""Laws of a run: computing every document token gives the full prefill's answers, and a stop changes no outcome."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents import run as running
from sglang_ext.offline.documents.libraries import NO_CACHE, Arm
from sglang_ext.offline.evaluate.errors import EvaluationError
from tests.kv.builders import one_thread  # noqa: F401
from tests.offline.documents import stage

WHOLE = [Arm("epic", 100.0), Arm("random:0", 1.0), Arm("cache_blend", 1.0), Arm("a3", 1.0)]
KL_OF_ROUNDING = 1e-3
CLOCK = {"ttft_ms"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    libraries = [
        stage.plain(*WHOLE, Arm("epic", 1.0)),
        stage.mapped(Arm("rank_disagreement", 1.0), Arm("rank_disagreement")),
    ]
    return stage.run(tmp_path_factory.mktemp("found"), libraries)


def timeless(results) -> list:
    return [
        {arm: [one.model_dump(exclude=CLOCK) for one in outcomes] for arm, outcomes in arms.items()}
        for arms in results.arms
    ]


@pytest.mark.parametrize("arm", WHOLE)
def test_a_whole_budget_gives_the_full_prefills_answers(found, arm):
    _, results = found
    plain = results.arms[0]
    assert [one.text for one in plain[arm]] == [one.text for one in plain[Arm(FULL)]]
    assert max(one.kl for one in plain[arm]) < KL_OF_ROUNDING
    assert all(one.computed == one.length for one in plain[arm])


def test_mapped_documents_computed_whole_give_the_full_prefills_answers(found):
    _, (plain, mapped) = found[0], found[1].arms
    assert [one.text for one in mapped[Arm("rank_disagreement", 1.0)]] == [one.text for one in plain[Arm(FULL)]]
    assert all(one.kl > KL_OF_ROUNDING for one in mapped[Arm("rank_disagreement")])


def test_without_recompute_documents_change_the_answers(found):
    plain = found[1].arms[0]
    assert all(one.kl > KL_OF_ROUNDING for one in plain[Arm(NO_RECOMPUTE)][1:])
    assert max(one.kl for one in plain[Arm(FULL)]) < KL_OF_ROUNDING


def test_what_is_computed_is_what_the_rule_says(found):
    _, results = found
    plain = results.arms[0]
    for prompt, none, epic, full, bare in zip(
        results.prompts, *(plain[arm] for arm in (Arm(NO_RECOMPUTE), Arm("epic", 1.0), Arm(FULL), Arm(NO_CACHE)))
    ):
        inside = sum(map(len, prompt.documents))
        assert none.computed == len(prompt.ids) - inside
        assert epic.computed == none.computed + len(prompt.documents)
        assert full.computed == full.length == len(prompt.ids)
        assert bare.computed == bare.length == len(prompt.ids) - inside
        assert bare.flops < none.flops < epic.flops < full.flops


def test_a_second_run_measures_nothing_again(tmp_path):
    ticks: list = []
    first = stage.run(tmp_path, [stage.plain()])[1]
    again = stage.run(tmp_path, [stage.plain()], ticks=ticks)[1]
    assert ticks == [(12, 12)]
    assert again.arms == first.arms


def test_more_items_measure_only_what_is_new(tmp_path):
    ticks: list = []
    stage.run(tmp_path, [stage.plain()], stage.items(2))
    stage.run(tmp_path, [stage.plain()], stage.items(4), ticks=ticks)
    assert ticks == [(6, 12), (8, 12), (10, 12), (12, 12)]


def test_one_prompt_cut_into_other_documents_is_another_one(tmp_path):
    item = stage.items(3)[2]
    joined = dataclasses.replace(item, id="joined", documents=("".join(item.documents),))
    _, results = stage.run(tmp_path, [stage.plain()], [item, joined])
    apart, together = results.arms[0][Arm(NO_RECOMPUTE)]
    assert apart.kl != together.kl
    assert apart.computed == together.computed


def test_a_stopped_run_goes_on_to_what_a_whole_one_gives(tmp_path, monkeypatch, found):
    libraries = [stage.plain(Arm("epic", 1.0)), stage.mapped(Arm("rank_disagreement"))]
    monkeypatch.setattr(running, "BATCH", 2)

    class Stopped(Exception):
        pass

    class Ticks(list):
        def append(self, tick):
            if tick[0] >= 12:
                raise Stopped

    with pytest.raises(Stopped):
        stage.run(tmp_path / "stopped", libraries, ticks=Ticks())
    resumed = stage.run(tmp_path / "stopped", libraries)[1]
    assert timeless(resumed) == timeless(stage.run(tmp_path / "whole", libraries)[1])


def test_the_order_of_the_items_changes_no_outcome(tmp_path, found):
    backwards = stage.run(tmp_path, found[0].libraries, stage.items()[::-1])[1]
    for one, other in zip(backwards.arms, found[1].arms):
        for arm, outcomes in one.items():
            assert [a.text for a in outcomes[::-1]] == [b.text for b in other[arm]]


def test_a_document_whose_tokens_merge_with_the_prompt_is_a_counted_miss(tmp_path):
    [item] = stage.items(1)
    name = item.documents[0].split()[0]
    merged = dataclasses.replace(item, documents=(item.documents[0].replace(name, name[1:]).lstrip(),))
    _, results = stage.run(tmp_path, [stage.plain()], [merged])
    [none] = results.arms[0][Arm(NO_RECOMPUTE)]
    [full] = results.arms[0][Arm(FULL)]
    assert none.missed == 1
    assert (none.text, none.computed) == (full.text, full.length)  # its tokens are computed where they stand


def test_an_item_without_documents_is_refused(tmp_path):
    bare = [dataclasses.replace(item, documents=()) for item in stage.items(1)]
    with pytest.raises(EvaluationError, match="has no documents"):
        stage.run(tmp_path, [stage.plain()], bare)


@pytest.mark.parametrize("arm", [("magic", 0.0), ("cache_blend", 1.5), ("epic", 0.5)])
def test_arms_that_make_no_sense_are_refused(arm):
    with pytest.raises(Exception, match="magic|share|whole number"):
        Arm(*arm)
