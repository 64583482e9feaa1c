"""From rows to figures: laws on rows made by the simulator."""

from __future__ import annotations

import csv
import io
import json
import random
import re
from bisect import bisect_left, bisect_right
from html.parser import HTMLParser
from statistics import quantiles

import pytest
from rich.console import Console

from loadtest.errors import LoadTestError
from loadtest.plots import parts_of
from loadtest.predict import predict, service_of
from loadtest.report import contents, faults_of, report
from loadtest.rows import Row
from loadtest.run import BatchTime, Machine, Point, Run, RunFolder, Saturation, Served, Settings
from loadtest.schedule import poisson
from loadtest.simulate import Service, simulate
from loadtest.summary import Summary, SystemRow, summarise
from tests.loadtest.pair import MACHINE

REQUESTS, WARM_UP, LIMIT_S = 120, 20, 1.0
CURVES = {"large": [(1, 0.3), (32, 9.0)], "lift-0.3": [(1, 0.2), (8, 1.2), (32, 4.5)]}
PHASES = {
    "export": 3.0,
    "transfer": 2.0,
    "map": 20.0,
    "recompute": 110.0,
    "total": 140.0,
    "lift_call": 150.0,
    "chat_call": 30.0,
}
US, SEEDS = (0.3, 0.9), (0, 1, 2)


def make_run(us=US, seeds=SEEDS, drop: tuple = ()) -> tuple[Run, list[Row]]:
    """A complete run of two systems, less the points in `drop`."""
    served = Served(url="http://large", model="large", model_digest="large" * 8, threads=2)
    run = Run(settings=Settings(requests=REQUESTS, warm_up=WARM_UP), machine=MACHINE, target=served, source=served)
    for system, curve in CURVES.items():
        service = [BatchTime(batch=batch, seconds=[s, s * 1.1, s * 0.9], batches=[1, 1, 1]) for batch, s in curve]
        rates = [32 / curve[-1][1] * factor for factor in (0.98, 1.0, 1.05)]
        run = run.with_saturation(
            Saturation(
                system=system, tokens=149, method="three_batches", repeats=rates, mean_batch=31.0, service=service
            )
        )
    planned = [(system, u, seed) for seed in seeds for u in us for system in CURVES]
    run = run.model_copy(update={"planned": planned})
    rows: list[Row] = []
    for system, u, seed in planned:
        if (system, u, seed) in drop:
            continue
        rate = u * run.mu_target
        arrivals = [arrival.offset_s for arrival in poisson(rate, REQUESTS, seed)]
        found = simulate(arrivals, Service(CURVES[system]))
        lifts = {} if system == "large" else {"lift": "applied", "phases_ms": PHASES}
        tags = {"system": system, "u": u, "rate": rate, "seed": seed}
        for index, (start, ttft) in enumerate(zip(arrivals, found.ttft_s)):
            end = start + ttft
            times = {"scheduled_s": start, "sent_s": start + 1e-4, "first_token_s": end, "end_s": end}
            rows.append(Row(**tags, index=index, **times, **lifts))
        point = Point(**tags, digest=run.digest(), mean_batch=found.mean_batch, seconds=1.0)
        run = run.with_point(point)
    return run, rows


@pytest.fixture(scope="module")
def whole() -> tuple[Run, list[Row], Summary]:
    run, rows = make_run()
    return run, rows, summarise(run, rows, LIMIT_S)


@pytest.fixture(scope="module")
def files(whole) -> dict[str, bytes]:
    return dict(contents(*whole))


def row_of(summary: Summary, system: str, u: float) -> SystemRow:
    [found] = [row for row in summary.rows if (row.system, row.u) == (system, u)]
    return found


def changed(rows: list[Row], system: str, u: float, count: int, **change) -> list[Row]:
    """The first `count` rows behind the warm-up of one system and load, in each seed, changed."""
    return [
        row.model_copy(update=change)
        if (row.system, row.u) == (system, u) and WARM_UP <= row.index < WARM_UP + count
        else row
        for row in rows
    ]


def failing(rows: list[Row], system: str, u: float, count: int) -> list[Row]:
    return changed(rows, system, u, count, error="HTTP 500", first_token_s=None, lift=None)


def test_the_quantiles_are_those_of_the_library(whole):
    """Between its two kinds: the library interpolates, the report names a value that was measured."""
    _, rows, summary = whole
    for row in summary.rows:
        ttft = sorted(
            one.ttft_s * 1000 for one in rows if (one.system, one.u) == (row.system, row.u) and one.index >= WARM_UP
        )
        for q, found in ((50, row.ttft_median_ms), (90, row.ttft_p90_ms), (99, row.ttft_p99_ms)):
            assert found in ttft
            between = [quantiles(ttft, n=100, method=kind)[q - 1] for kind in ("inclusive", "exclusive")]
            assert ttft[max(bisect_left(ttft, min(between)) - 1, 0)] <= found
            assert found <= ttft[min(bisect_right(ttft, max(between)), len(ttft) - 1)]


def test_every_request_behind_the_warm_up_counts_once(whole):
    _, _, summary = whole
    assert {(row.requests, row.seeds, row.errors) for row in summary.rows} == {
        ((REQUESTS - WARM_UP) * len(SEEDS), len(SEEDS), 0)
    }


def test_warm_up_is_by_arrival(whole):
    """What the first arrivals took changes nothing, though some of them end last."""
    run, rows, summary = whole
    late = [row.model_copy(update={"first_token_s": 1e6, "end_s": 1e6}) if row.index < WARM_UP else row for row in rows]
    assert summarise(run, late, LIMIT_S) == summary


def test_the_order_of_the_rows_does_not_matter(whole):
    run, rows, summary = whole
    mixed = rows[:]
    random.Random(0).shuffle(mixed)
    assert summarise(run, mixed, LIMIT_S).model_dump_json() == summary.model_dump_json()


def test_failures_stay_in_the_denominator(whole):
    """Five of 100 fail in each seed: goodput and the share of lifts fall, p99 falls on a failure, p50 only moves up."""
    run, rows, summary = whole
    was, found = (
        row_of(one, "lift-0.3", 0.3) for one in (summary, summarise(run, failing(rows, "lift-0.3", 0.3, 5), LIMIT_S))
    )
    assert found.errors == 15 and found.requests == was.requests
    assert found.goodput <= was.goodput - 0.0499
    assert found.applied == pytest.approx(0.95)
    assert found.ttft_p99_ms is None and found.ttft_p99_spread_ms[1] is None and found.speedup_p99 is None
    assert found.ttft_median_ms >= was.ttft_median_ms


def test_a_failed_quantile_is_never_a_number(whole):
    run, rows, _ = whole
    broken = failing(rows, "lift-0.3", 0.3, 5)
    files = contents(run, broken, summarise(run, broken, LIMIT_S))
    line = next(line for line in files["table.md"].decode().splitlines() if line.startswith("| lift-0.3 | 0.3 |"))
    assert "failed" in line and "15 of 300" in line and "0.00" not in line
    assert "15 requests failed" in files["report.html"].decode()


def test_goodput_is_the_share_within_the_limit(whole):
    run, rows, _ = whole
    for limit_s in (0.0, 0.25, 1.0, 1e9):
        for row in summarise(run, rows, limit_s).rows:
            mine = [one for one in rows if (one.system, one.u) == (row.system, row.u) and one.index >= WARM_UP]
            assert row.goodput == sum(one.ttft_s <= limit_s for one in mine) / len(mine)


def test_the_spread_holds_every_seed(whole):
    run, rows, summary = whole
    for row in summary.rows:
        alone = [
            row_of(summarise(run.model_copy(update={"points": [point]}), rows, LIMIT_S), row.system, row.u)
            for point in run.points
            if (point.system, point.u) == (row.system, row.u)
        ]
        for name in ("median", "p90", "p99"):
            values = [getattr(one, f"ttft_{name}_ms") for one in alone]
            low, high = getattr(row, f"ttft_{name}_spread_ms")
            assert (low, high) == (min(values), max(values)) and low <= getattr(row, f"ttft_{name}_ms") <= high


def test_speedups_are_native_over_this(whole):
    _, _, summary = whole
    for u in US:
        native, lift = row_of(summary, "large", u), row_of(summary, "lift-0.3", u)
        assert lift.speedup_median == native.ttft_median_ms / lift.ttft_median_ms
        assert lift.speedup_p99 == native.ttft_p99_ms / lift.ttft_p99_ms


def test_the_simulator_agrees_with_rows_that_it_made(whole):
    """The median of S(b) over the repeats is the curve of the rows, and the arrivals are the same."""
    _, _, summary = whole
    for row in summary.rows:
        assert row.simulated_median_ms == pytest.approx(row.ttft_median_ms)
        assert row.simulated_p99_ms == pytest.approx(row.ttft_p99_ms)
        assert row.simulated_batch == pytest.approx(row.mean_batch)


def test_more_servers_are_never_worse(whole):
    run, _, _ = whole
    service = service_of(run, "large")
    p99 = [predict(run, service, 2 * run.mu_target, SEEDS, servers).p99_s for servers in (1, 2, 4, 8)]
    assert p99 == sorted(p99, reverse=True)


def test_the_parts_of_the_first_token_add_up(whole):
    run, _, summary = whole
    for row in summary.rows:
        parts = parts_of(run, row)
        assert sum(parts.values()) == pytest.approx(row.first_token_mean_ms)
        assert min(parts.values()) >= 0
    assert parts["map"] == 20.0 and parts["recompute"] == 110.0 and parts["the lifted request"] == 30.0


def test_mu_is_the_median_and_a_bracket_its_bounds(whole):
    run, rows, summary = whole
    [large, lift] = summary.mu[149].values()
    assert (large.median, large.ratio) == (32 / 9.0, 1.0)
    assert lift.ratio == pytest.approx(2.0) and lift.lowest <= lift.median <= lift.highest
    bracket = Saturation(system="cascade", tokens=149, method="bisection", stable=4.0, unstable=5.0)
    cascade = summarise(run.with_saturation(bracket), rows, LIMIT_S).mu[149]["cascade"]
    assert (cascade.lowest, cascade.median, cascade.highest, cascade.method) == (4.0, 4.5, 5.0, "bisection")


def test_a_generator_that_lagged_makes_its_row_invalid(whole):
    run, rows, _ = whole
    late = [
        row.model_copy(update={"sent_s": row.scheduled_s + 0.1})
        if (row.system, row.u, row.seed) == ("large", 0.3, 1)
        else row
        for row in rows
    ]
    summary = summarise(run, late, LIMIT_S)
    assert [row.valid for row in summary.rows] == [False, True, True, True]
    assert any("large at u = 0.3" in fault for fault in faults_of(run, summary))


def test_a_run_that_was_cut_says_so():
    run, rows = make_run(drop=(("lift-0.3", 0.9, 2), ("large", 0.9, 2)))
    half = Row(system="large", u=0.9, rate=1.0, seed=2, index=60, scheduled_s=0, sent_s=0, first_token_s=1e9, end_s=1e9)
    summary = summarise(run, [*rows, half], LIMIT_S)
    assert sorted(summary.missing) == ["large, u = 0.9, seed 2", "lift-0.3, u = 0.9, seed 2"]
    assert row_of(summary, "large", 0.9).seeds == 2
    assert row_of(summary, "large", 0.9).requests == 2 * (REQUESTS - WARM_UP)  # the half point does not count
    page = contents(run, rows, summary)["report.html"].decode()
    assert "not complete: 2 of 12 points are missing" in page


def test_points_of_other_settings_are_left_out(whole):
    run, rows, _ = whole
    stale = run.with_point(run.points[0].model_copy(update={"digest": "another"}))
    summary = summarise(stale, rows, LIMIT_S)
    assert row_of(summary, "large", 0.3).seeds == 2
    assert any("1 points of other settings" in fault for fault in faults_of(stale, summary))


def test_the_same_rows_give_the_same_bytes(whole, files, tmp_path):
    run, rows, _ = whole
    assert set(files) == {
        "summary.json", "table.md", "table.csv", "report.html", "ttft.png", "batch.png", "first_token.png",
    }  # fmt: skip
    folder = RunFolder(tmp_path)
    folder.save(run)
    with folder.writer() as writer:
        for row in rows:
            writer.write(row)
    report(folder, LIMIT_S, Console(file=io.StringIO()))
    assert {name: (tmp_path / name).read_bytes() for name in files} == files


def test_the_files_tell_the_same(whole, files):
    _, _, summary = whole
    told = json.loads(files["summary.json"])
    assert Summary.model_validate(told) == summary
    names = [
        "system", "u", "rate", "seeds", "ttft_median_ms", "ttft_p90_ms", "ttft_p99_ms", "mean_batch", "errors",
        "goodput", "lag_p99_ms", "valid",
    ]  # fmt: skip
    assert set(names) <= set(told["rows"][0])
    table = list(csv.DictReader(io.StringIO(files["table.csv"].decode())))
    assert [float(line["ttft_p99_ms"]) for line in table] == pytest.approx(
        [row.ttft_p99_ms for row in summary.rows], rel=1e-5
    )
    assert all(files[name].startswith(b"\x89PNG") for name in files if name.endswith(".png"))


def test_the_page_needs_nothing_beside_it(files):
    text = files["report.html"].decode()
    opened: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert all(value.startswith("data:") for name, value in attrs if name in ("src", "href"))
            if tag not in ("meta", "img"):
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    reader = Reader()
    reader.feed(text)
    assert opened == [] and text.count("<img") == 3 and not re.search(r"url\(|@import", text)


def test_what_servers_are_called_does_not_become_markup(whole):
    run, rows, summary = whole
    odd = run.model_copy(update={"target": run.target.model_copy(update={"model": "<b>large</b>"})})
    assert "<b>" not in contents(odd, rows, summary)["report.html"].decode()


def test_mu_alone_is_a_report(whole, tmp_path):
    run, _, _ = whole
    alone = run.model_copy(update={"points": [], "planned": []})
    files = contents(alone, [], summarise(alone, [], LIMIT_S))
    assert set(files) == {"summary.json", "table.md", "table.csv", "report.html"}
    assert "Saturation" in files["table.md"].decode()


def test_nothing_measured_is_no_report(tmp_path):
    folder = RunFolder(tmp_path)
    machine = Machine(processor="slow", cores=1, memory_gb=1.0, python="3", kvlift="0", sglang="0")
    folder.save(Run(settings=Settings(), machine=machine, target=Served(url="u", model="m", model_digest="d")))
    with pytest.raises(LoadTestError, match="holds no finished measurement"):
        report(folder, LIMIT_S, Console(file=io.StringIO()))
