"""The bench runs both sides in turn on the same prompts, and says what it counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sglang_ext.errors import PackError, PlanError
from sglang_ext.offline.bench.cli import bench
from sglang_ext.offline.bench.prefill import Measured, Prompts, Subject, Sweep, alternate, measure
from sglang_ext.offline.bench.presets import PRESETS, preset_named
from sglang_ext.offline.bench.rows import PHASES, BenchResult
from sglang_ext.offline.bench.run import PairFolders
from sglang_ext.offline.load_pair import CONTEXT, SHAPES

TINY = "2x32x2x1x16x48:3x48x4x2x16x64:k2:r8"
OTHER = "2x32x2x1x16x48:4x48x4x2x16x64:k2:r8"
KEYS = {
    "shape", "tokens", "batch", "rho", "native_ms", "lift_ms", "speedup", "ceiling_dense", "ceiling_frontier",
    "share_of_ceiling", "phases_ms",
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLIFT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folders(cache) -> PairFolders:
    return PairFolders.of_shape(TINY)


@pytest.fixture(scope="module")
def subject(folders: PairFolders) -> Subject:
    return load(folders)


def load(folders: PairFolders, dtype: torch.dtype = torch.float32) -> Subject:
    return Subject.load("tiny", folders.source, folders.target, folders.pack, "cpu", dtype)


class Recorded:
    """Stands for prompts: says in which order it was called, and takes the time it is told."""

    def __init__(self) -> None:
        self.calls: list[float | None] = []

    def native(self) -> float:
        self.calls.append(None)
        return 100.0 + len(self.calls)

    def lift(self, rho: float) -> Measured:
        self.calls.append(rho)
        return Measured(10.0, {"map": 1.0})


def test_both_sides_are_timed_in_turn_and_every_second_round_backwards():
    prompts, ticks = Recorded(), []
    natives, lifts = alternate(prompts, (0.0, 0.3), 3, lambda: ticks.append(len(prompts.calls)))
    assert prompts.calls == [None, 0.0, 0.3, 0.3, 0.0, None, None, 0.0, 0.3]
    assert ticks == [3, 6, 9]
    assert natives == [101.0, 106.0, 107.0] and {rho: len(one) for rho, one in lifts.items()} == {0.0: 3, 0.3: 3}


def test_a_sweep_gives_a_row_for_each_length_batch_and_budget(subject: Subject):
    sweep = Sweep((40, 9), batches=(2, 1), rhos=(0.0, 0.3), rounds=2)
    done: list[float] = []
    rows = list(measure(subject, sweep, done.append))
    cases = [(9, 1), (9, 2), (40, 1), (40, 2)]
    assert [(row.tokens, row.batch, row.rho) for row in rows] == [(*case, rho) for case in cases for rho in sweep.rhos]
    assert sum(done) == pytest.approx(sweep.operations(subject.costs)) and len(done) == 2 * len(cases)
    for row in rows:
        assert row.rounds == 2 and set(row.phases_ms) == set(PHASES)
        assert row.native_range_ms[0] <= row.native_ms <= row.native_range_ms[1]
        assert row.lift_range_ms[0] <= row.lift_ms <= row.lift_range_ms[1]
        assert sum(row.phases_ms.values()) <= row.lift_range_ms[1] + 0.01
        assert row.speedup == pytest.approx(row.native_ms / row.lift_ms, rel=1e-2)
        assert row.ceiling_frontier == round(subject.costs.ceiling_frontier(row.tokens, row.rho), 4)
        assert row.ceiling_frontier > row.ceiling_dense or row.rho == 0
        assert row.share_of_ceiling == pytest.approx(row.speedup / row.ceiling_frontier, abs=1e-3)


def test_both_sides_run_the_same_prompts_and_the_source_is_outside_the_time(subject: Subject, monkeypatch):
    prompts = Prompts(subject, 12, 2)
    seen: dict[str, list] = {"native": [], "lift": []}
    target = subject.target
    prefill, lift = target.prefill, target.lift
    monkeypatch.setattr(target, "prefill", lambda ids, **more: seen["native"].append(ids) or prefill(ids, **more))
    monkeypatch.setattr(
        target, "lift", lambda ids, blocks, *rest, **more: seen["lift"].append(ids) or lift(ids, blocks, *rest, **more)
    )
    monkeypatch.setattr(subject.source, "prefill", lambda *_: pytest.fail("the source ran inside the timed part"))
    prompts.native()
    prompts.lift(0.3)
    assert seen["native"] == seen["lift"] and [len(ids) for ids in seen["lift"][0]] == [12, 12]
    assert seen["lift"][0][0] != seen["lift"][0][1], "prompts of a batch must differ"


def test_a_bench_only_packs_maps_take_the_models_dtype(folders: PairFolders):
    assert load(folders).maps.dtype == torch.float32
    low = load(folders, torch.bfloat16)
    assert low.maps.dtype == low.target.model.dtype == torch.bfloat16
    assert [row.rho for row in measure(low, Sweep((9,), rhos=(0.3,), rounds=1), lambda _: None)] == [0.3]


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(subject: Subject):
    with pytest.raises(PlanError, match=f"tokens {CONTEXT + 1}: the source of 'tiny' has a context of {CONTEXT}"):
        next(measure(subject, Sweep((9, CONTEXT + 1)), lambda _: None))


def test_a_pack_of_another_model_is_refused(folders: PairFolders):
    other = PairFolders.of_shape(OTHER)
    with pytest.raises(PackError, match="the pack was made for target 'load-target'"):
        load(PairFolders(folders.source, other.target, folders.pack))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": (1,)}, "tokens 1: a lift needs"),
        ({"tokens": ()}, "tokens: expected at least one"),
        ({"tokens": (9,), "batches": (0,)}, "batch 0: expected at least 1"),
        ({"tokens": (9,), "rhos": (0.3, 1.5)}, "rho must lie in"),
        ({"tokens": (9,), "rounds": 0}, "rounds 0: expected at least 1"),
    ],
)
def test_a_sweep_out_of_range_is_refused(given, message):
    with pytest.raises(PlanError, match=message):
        Sweep(**given)


def test_every_preset_is_of_known_shapes_and_holds_the_issues_grid():
    for preset in PRESETS.values():
        assert set(preset) <= set(SHAPES)
    measured = {
        (tokens, rho)
        for sweep in preset_named("two-cores")["qwen3-0.6b"]
        for tokens, batch in sweep.cases
        if batch == 1
        for rho in sweep.rhos
    }
    assert {(tokens, rho) for tokens in (149, 512, 1024, 2048, 4096, 8192) for rho in (0, 0.2, 0.3, 0.5)} <= measured
    with pytest.raises(PlanError, match="'fast' is not known; expected one of two-cores, gpu"):
        preset_named("fast")


def run(tmp_path: Path, *words: str):
    return CliRunner().invoke(
        bench, ["prefill", *words, "--out", str(tmp_path / "bench.json"), "--plots", str(tmp_path / "plots")]
    )


def test_the_command_writes_rows_plots_and_a_table(cache, tmp_path):
    done = run(tmp_path, "--shape", TINY, "--tokens", "9,20", "--batch", "1,2", "--rho", "0,0.3", "--rounds", "1")
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "bench.json").read_text())
    assert len(result["rows"]) == 8 and all(KEYS <= set(row) for row in result["rows"])
    assert BenchResult.model_validate(result).shapes[TINY].map == 3 * 2 * (2 * 16) * 32
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "batch.png", "phases.png", "speedup.png", "throughput.png",
    ]  # fmt: skip
    assert "frontier" in done.output and "body" in done.output


def test_own_folders_are_measured_as_well_as_shapes(folders: PairFolders, tmp_path):
    words = [f"--{role}={getattr(folders, role)}" for role in ("source", "target", "pack")]
    done = run(tmp_path, *words, "--tokens", "9", "--rho", "0.3", "--rounds", "1")
    assert done.exit_code == 0, done.output
    [row] = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert (row["shape"], row["tokens"], row["batch"], row["rho"]) == ("target", 9, 1, 0.3)


def test_an_interrupt_keeps_the_rows_of_finished_cases(cache, tmp_path, monkeypatch):
    lift = Prompts.lift

    def interrupted(self: Prompts, rho: float) -> Measured:
        if len(self._ids[0]) == 20:
            raise KeyboardInterrupt
        return lift(self, rho)

    monkeypatch.setattr(Prompts, "lift", interrupted)
    done = run(tmp_path, "--shape", TINY, "--tokens", "20,9", "--rho", "0.3", "--rounds", "1")
    assert done.exit_code == 130
    assert [row["tokens"] for row in json.loads((tmp_path / "bench.json").read_text())["rows"]] == [9]
    assert (tmp_path / "plots" / "speedup.png").exists() and "written" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--shape", "huge"), "expected one of default"),
        (("--preset", "fast"), "expected one of two-cores, gpu"),
        (("--preset", "two-cores", "--shape", TINY), "give one of"),
        (("--source", "somewhere"), "together"),
        (("--tokens", "9,x"), "expected numbers with commas"),
        (("--shape", TINY, "--tokens", "99999"), "context of"),
        (("--shape", TINY, "--rho", "2"), "rho must lie in"),
    ],
)
def test_bad_input_is_named(cache, tmp_path, words, message):
    done = run(tmp_path, *words)
    assert done.exit_code != 0 and message in " ".join(done.output.replace("│", " ").split())
    assert not (tmp_path / "bench.json").exists()
