"""The sweep on fake workers: the same load for all, each point once, whatever interrupts it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gevent
import pytest

from loadtest.errors import LoadTestError
from loadtest.run import RunFolder
from loadtest.schedule import poisson
from loadtest.sweep import Plan, left_of, seconds_of, sweep
from tests.loadtest.pair import Told, asked, begun, bench, worker

REQUESTS = 12


@pytest.fixture
def pair() -> Iterator[tuple[str, str]]:
    with worker(name="large") as target, worker(name="small") as source:
        yield target, source


def short(path: Path, **more) -> RunFolder:
    return begun(path, **{"requests": REQUESTS, "warm_up": 2, "tokens": 20, **more})


def test_every_system_gets_the_same_arrivals_and_prompts(pair, tmp_path):
    target, source = pair
    folder, told = short(tmp_path), Told()
    plan = Plan(("large", "lift-0.3", "automatic", "small"), us=(0.5, 1.5), seeds=(3,))
    sweep(bench(target, source), folder, plan, told)
    rows = folder.rows()
    for u in plan.us:
        scheduled = [arrival.offset_s for arrival in poisson(u * 100, REQUESTS, 3)]
        for system in plan.systems:
            mine = sorted((row for row in rows if (row.system, row.u) == (system, u)), key=lambda row: row.index)
            assert [row.scheduled_s for row in mine] == scheduled
            assert {row.rate for row in mine} == {u * 100}
    assert len(rows) == len(list(plan.points())) * REQUESTS
    # The prompt's first word is its seed and index: the target was asked for each of them by three systems, twice.
    assert Counter(asked(target, "/stats")["prompts"]) == {f"3.{index}": 6 for index in range(REQUESTS)}
    assert told.units == pytest.approx(seconds_of(list(plan.points()), folder.load()))


def test_the_source_is_prefilled_once_for_all_lifts_of_a_seed(pair, tmp_path):
    target, source = pair
    plan = Plan(("lift-0.3", "lift-0.5", "automatic"), us=(1.0, 2.0), seeds=(0, 1))
    sweep(bench(target, source), short(tmp_path), plan, Told())
    assert asked(source, "/kv/counters")["prefill_requests"] == 2 * REQUESTS


def test_a_system_that_starts_at_the_source_finds_it_empty(pair, tmp_path):
    target, source = pair
    plan = Plan(("lift-0.3", "small"), us=(1.0, 2.0), seeds=(0,))
    sweep(bench(target, source), short(tmp_path), plan, Told())
    # Each load: prefilled for the lift, then emptied and asked again by the small model alone.
    assert asked(source, "/kv/counters")["prefill_requests"] == 4 * REQUESTS
    assert asked(source, "/flushes")["flushes"] == 4


def test_the_order_of_a_plan():
    """A seed is finished before the next begins, and within a load the systems follow one another."""
    plan = Plan(("a", "b"), us=(1.0, 2.0), seeds=(0, 1))
    assert list(plan.points())[:4] == [("a", 1.0, 0), ("b", 1.0, 0), ("a", 2.0, 0), ("b", 2.0, 0)]
    assert len(set(plan.points())) == 8


def test_what_is_finished_is_not_measured_again(pair, tmp_path):
    target, source = pair
    folder = short(tmp_path)
    sweep(bench(target, source), folder, Plan(("large",), (1.0,), (0,)), Told())
    rows, asked_so_far = folder.rows(), asked(target, "/stats")["prompts"]
    more = Plan(("large", "lift-0.3"), (1.0,), (0,))
    assert left_of(more, folder.load()) == [("lift-0.3", 1.0, 0)]
    sweep(bench(target, source), folder, more, Told())
    assert folder.rows()[: len(rows)] == rows
    assert len(asked(target, "/stats")["prompts"]) == len(asked_so_far) + REQUESTS
    assert left_of(more, folder.load()) == []


def test_other_settings_or_another_mu_measure_again(pair, tmp_path):
    folder = short(tmp_path)
    plan = Plan(("large",), (1.0,), (0,))
    sweep(bench(*pair), folder, plan, Told())
    run = folder.load()
    longer = run.model_copy(update={"settings": run.settings.model_copy(update={"tokens": 30})})
    with pytest.raises(LoadTestError, match="mu of large at 30 tokens has not been measured"):
        seconds_of(list(plan.points()), longer)
    fewer = run.model_copy(update={"settings": run.settings.model_copy(update={"warm_up": 1})})
    faster = run.with_saturation(run.saturation[0].model_copy(update={"repeats": [101.0]}))
    assert left_of(plan, run) == []
    assert left_of(plan, fewer) == left_of(plan, faster) == list(plan.points())


def test_a_server_that_dies_leaves_its_rows_and_the_next_one_goes_on(tmp_path):
    """Each request is in the rows exactly once at the end, and the finished point is not touched."""
    folder = short(tmp_path, requests=60)
    plan = Plan(("large",), (1.0, 3.0), (0,))
    with worker(name="large", die_at=90) as target, worker(name="small") as source, pytest.raises(LoadTestError):
        sweep(bench(target, source), folder, plan, Told())
    kept = folder.rows()
    assert sorted(row.index for row in kept if row.u == 1.0 and not row.error) == list(range(60))
    assert any(row.u == 3.0 and not row.error for row in kept) and any(row.error for row in kept)
    assert [point.u for point in folder.load().points] == [1.0]
    with worker(name="large") as target, worker(name="small") as source:
        sweep(bench(target, source), folder, plan, Told())
    rows = folder.rows()
    assert [row for row in rows if row.u == 1.0] == [row for row in kept if row.u == 1.0]
    assert sorted(row.index for row in rows if row.u == 3.0) == list(range(60))
    assert not any(row.error for row in rows)


def test_a_stop_keeps_what_was_measured(pair, tmp_path):
    folder = short(tmp_path, requests=400)
    driven = bench(*pair)
    gevent.spawn_later(1.0, driven.stop)
    with pytest.raises(LoadTestError, match="stopped in mid-load"):
        sweep(driven, folder, Plan(("large",), (1.0,), (0,)), Told())
    assert 0 < len(folder.rows()) < 400
    assert folder.load().points == []
    with pytest.raises(LoadTestError, match="stopped before"):
        sweep(driven, folder, Plan(("large",), (1.0,), (0,)), Told())


def test_no_answer_at_all_is_told(tmp_path):
    with (
        worker(name="status-500") as target,
        worker(name="small") as source,
        pytest.raises(LoadTestError, match="none of 12 requests succeeded; the last one: .*out of memory"),
    ):
        sweep(bench(target, source), short(tmp_path), Plan(("large",), (1.0,), (0,)), Told())
    assert len(RunFolder(tmp_path).rows()) == REQUESTS


def test_another_machine_or_model_is_another_run(tmp_path):
    folder = short(tmp_path)
    run = folder.load()
    other = run.model_copy(update={"target": run.target.model_copy(update={"threads": 7})})
    with pytest.raises(LoadTestError, match="measured with another target .*on 7 threads.*name another folder"):
        folder.begin(other)
    moved = run.model_copy(update={"target": run.target.model_copy(update={"url": "http://elsewhere"})})
    assert folder.begin(moved).saturation == run.saturation


@pytest.mark.parametrize("text", ["", "{", '{"version": 2}', '{"version": 1, "extra": 0}'])
def test_a_broken_run_is_named(tmp_path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(LoadTestError, match="run.json"):
        RunFolder(tmp_path).load()
