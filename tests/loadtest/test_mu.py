"""Saturation on a fake server that answers one request after another, S seconds each: mu is 1 / S by construction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from loadtest.errors import LoadTestError
from loadtest.lineup import in_order, rho_of
from loadtest.mu import FULL, requests_of, three_batches
from loadtest.protocols import Saturations
from loadtest.run import RunFolder
from loadtest.simulate import CAP
from tests.loadtest.pair import Told, asked, begun, bench, worker

SERVICE_S = 0.004


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[str, str]]:
    with worker(name="large", service_s=SERVICE_S) as target, worker(name="small", service_s=0.0005) as source:
        yield target, source


def test_nothing_is_answered_faster_than_the_server_can(pair):
    """mu <= 1 / S and S(1) >= S, exactly: the server reckons its times."""
    told = Told()
    [first, second] = list(three_batches(bench(*pair), ["large", "lift-0.3"], 40, 2, (1, 4), told))
    assert [len(one.repeats) for one in first + second] == [1, 1, 2, 2]
    for one in second:
        assert all(0 < rate <= 1 / SERVICE_S for rate in one.repeats)
        assert min(one.repeats) <= one.mu <= max(one.repeats)
        for timed in one.service:
            assert len(timed.seconds) == 2
            assert timed.batch > 1 or min(timed.seconds) >= SERVICE_S * 0.999
    assert told.units == requests_of(2, 2, (1, 4))


def test_a_pilot_whose_token_comes_late_does_not_shorten_the_batch():
    """As SGLang's does on a CPU: its token comes together with those of the batch behind it."""
    service_s = 0.03
    with worker(name="large", service_s=service_s, late=True) as target, worker(name="small") as source:
        [[found]] = list(three_batches(bench(target, source), ["large"], 40, 1, (4,), Told()))
    [timed] = found.service
    assert timed.batch == 4 and timed.seconds[0] > 3 * service_s


def test_a_batch_gathers_behind_the_pilot_and_does_not_count_it(pair):
    """The fake answers each request as a batch of its own: b batches, whatever ran before them."""
    *_, last = three_batches(bench(*pair), ["large", "lift-0.3", "small"], 40, 1, (1, 4), Told())
    for one in last:
        assert {timed.batch: timed.batches for timed in one.service} == {1: [1], 4: [4]}
        assert one.mean_batch == 1


def test_the_source_has_prefilled_what_is_lifted_and_only_that(pair):
    target, source = pair
    before = asked(source, "/kv/counters")["prefill_requests"]
    list(three_batches(bench(target, source), ["lift-0.3"], 40, 1, (), Told()))
    assert asked(source, "/kv/counters")["prefill_requests"] == before + CAP + FULL * CAP
    list(three_batches(bench(target, source), ["large"], 40, 1, (), Told()))
    assert asked(source, "/kv/counters")["prefill_requests"] == before + CAP + FULL * CAP


def test_the_target_is_emptied_before_each_load(pair):
    target, source = pair
    before = asked(target, "/flushes")["flushes"]
    list(three_batches(bench(target, source), ["large"], 40, 2, (1,), Told()))
    assert asked(target, "/flushes")["flushes"] == before + 1 + 2 * 2


def test_a_lift_that_is_not_applied_is_no_lift():
    with (
        worker(name="large", lifts_failed_at=CAP + 50) as target,
        worker(name="small") as source,
        pytest.raises(LoadTestError, match="46 of 96 lifts were not applied; the first: the source holds nothing"),
    ):
        list(three_batches(bench(target, source), ["lift-0.3"], 40, 1, (), Told()))


def test_what_was_measured_is_kept_when_the_server_dies(tmp_path):
    """It dies in the second repeat; the first one is in the folder."""
    folder = RunFolder(tmp_path)
    with worker(name="large", die_at=CAP + FULL * CAP + 20) as target, worker(name="small") as source:
        known = begun(tmp_path, mu=1.0)
        assert known.load().mu_target == 1.0
        with pytest.raises(LoadTestError):
            Saturations(149, ["large"], 2, ()).measure(bench(target, source), folder, Told())
    [kept] = folder.load().saturation
    assert len(kept.repeats) == 1 and kept.mu > 1.0


def test_what_is_there_is_not_measured_again(tmp_path):
    run = begun(tmp_path).load()
    wanted = Saturations(149, ["large", "lift-0.3"], 1, ())
    assert list(wanted.not_in(run).systems) == ["lift-0.3"]
    assert list(Saturations(149, ["large"], 2, ()).not_in(run).systems) == ["large"]
    assert list(Saturations(512, ["large"], 1, ()).not_in(run).systems) == ["large"]


def test_a_system_without_its_server_is_told_before_anything_is_sent(pair, tmp_path):
    target, source = pair
    before = asked(target, "/kv/counters")
    with pytest.raises(LoadTestError, match="cascade needs a router"):
        Saturations(40, ["large", "cascade"], 1, ()).measure(bench(target, source), begun(tmp_path), Told())
    assert asked(target, "/kv/counters") == before


def test_names():
    assert rho_of("lift-0.25") == 0.25 and rho_of("lift-1") == 1 and rho_of("large") is None
    for wrong in ("lift", "lift-", "lift-1.5", "lift-.3", "native", "lift-0.3x"):
        with pytest.raises(LoadTestError, match="no system"):
            rho_of(wrong)
    names = ["small", "lift-0.5", "automatic", "cascade", "large", "lift-0.2"]
    assert in_order(set(names)) == ["large", "lift-0.2", "lift-0.5", "automatic", "cascade", "small"]
