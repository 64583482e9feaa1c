"""Laws of resuming: wherever a calibration is killed, the next one gives the pack of an uninterrupted one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from sglang_ext.cli import calibrate as command
from sglang_ext.errors import CalibrationError
from sglang_ext.offline.calibrate import calibrate
from sglang_ext.offline.checkpoint import Checkpoint
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.settings import Progress, Settings
from sglang_ext.transfer.pack import Pack
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import model_folder, prompts

FAMILY = Path(__file__).resolve().parents[2] / "sglang_ext" / "offline" / "family" / "models"
CORPUS = prompts(tuple(6 + n % 9 for n in range(60)), vocabulary=900)
FITTED = sum(n % 10 != 9 for n in range(len(CORPUS)))
# Bench-only packs skip the acceptance, which has a test of its own here.
SETTINGS = Settings(name="pack", k=2, rank=4, tokens=300, stride=2, accept_prompts=3, bench_only=True)


class Killed(BaseException):
    """The process ends here."""


class KilledAfter(Progress):
    """Ends the calibration at a number of calls; counts what was run again."""

    def __init__(self, calls: int = 10**9) -> None:
        self.calls = calls
        self.resumed_at: int | None = None

    def tokens(self, seen: int, wanted: int) -> None:
        self.calls -= 1
        if self.calls == 0:
            raise Killed

    def resumed(self, prompts: int) -> None:
        self.resumed_at = prompts


class KilledInAcceptance(Progress):
    """Ends the calibration at the first prompt that was measured."""

    def prompts(self, seen: int, wanted: int) -> None:
        raise Killed


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLIFT_CACHE", str(root / "cache"))
        small = model_folder(root / "small", "qwen3", 0, layers=2, kv_heads=2)
        large = model_folder(root / "large", "llama", 1, layers=3, kv_heads=2)
        yield tuple(TransformersExecutor.from_folder(folder) for folder in (small, large))


def make(pair, checkpoint: Checkpoint | None, progress: Progress | None = None, corpus=CORPUS, **settings) -> Pack:
    chosen = replace(SETTINGS, **settings)
    made = calibrate(*pair, ("small", "large"), "words", iter(corpus), chosen, progress or Progress(), checkpoint)
    return made[chosen.structures[0]]


@pytest.fixture(scope="module")
def uninterrupted(pair, tmp_path_factory):
    return make(pair, None).save(tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.parametrize("every", [1, 70, 120])
@pytest.mark.parametrize("calls", [1, 2, 3, 5, 7])
def test_wherever_it_ends_the_next_gives_the_same_pack(pair, uninterrupted, tmp_path, every, calls):
    checkpoint = Checkpoint(tmp_path / "pack", every)
    with pytest.raises(Killed):
        make(pair, checkpoint, KilledAfter(calls))
    seen = KilledAfter()
    pack = make(pair, checkpoint, seen).save(tmp_path / "pack")
    assert pack.manifest == uninterrupted.manifest
    assert pack.digest == uninterrupted.digest
    if every == 1:
        assert seen.resumed_at == min(8 * calls, FITTED)


def test_a_kill_in_the_acceptance_costs_no_new_pass(pair, tmp_path):
    checkpoint, seen = Checkpoint(tmp_path / "pack", 1), KilledAfter()
    with pytest.raises(Killed):
        make(pair, checkpoint, KilledInAcceptance(), bench_only=False)
    resumed = make(pair, checkpoint, seen, bench_only=False)
    assert seen.resumed_at == FITTED
    assert resumed.manifest.acceptance == make(pair, None, bench_only=False).manifest.acceptance


def test_it_may_end_again_and_again(pair, uninterrupted, tmp_path):
    checkpoint, resumed = Checkpoint(tmp_path / "pack", 1), []
    for _ in range(50):
        seen = KilledAfter(2 + len(resumed))
        try:
            pack = make(pair, checkpoint, seen)
        except Killed:
            resumed.append(seen.resumed_at)
        else:
            break
    assert resumed[1:] and resumed[1:] == sorted(resumed[1:])
    assert pack.save(tmp_path / "pack").digest == uninterrupted.digest


def test_what_was_run_is_not_run_again(pair, tmp_path, monkeypatch):
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    make(pair, checkpoint)
    ran: list[list[int]] = []
    capture = TransformersExecutor.prefill

    def prefill(self, batch, spare=0):
        ran.extend(batch)
        return capture(self, batch, spare)

    monkeypatch.setattr(TransformersExecutor, "prefill", prefill)
    make(pair, checkpoint)
    held_out = [ids for n, ids in enumerate(CORPUS) if n % 10 == 9]
    assert ran and all(ids in held_out for ids in ran)


@pytest.mark.parametrize(
    "settings", [{"k": 1}, {"rank": 8}, {"ridge": 1.0}, {"dtype": "bfloat16"}, {"structures": ("head",)}]
)
def test_what_is_solved_from_the_moments_may_change(pair, tmp_path, settings):
    """A failed or a second thought costs no new pass: the pack is the one that these settings give."""
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    make(pair, checkpoint)
    seen = KilledAfter()
    again = make(pair, checkpoint, seen, **settings).save(tmp_path / "again")
    fresh = make(pair, None, **settings).save(tmp_path / "fresh")
    assert seen.resumed_at
    assert (again.manifest, again.digest) == (fresh.manifest, fresh.digest)


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"seed": 1}, "seed was '0', is '1'"), ({"stride": 1}, "stride was '2', is '1'"), ({"tokens": 50}, "tokens was")],
)
def test_a_checkpoint_of_other_settings_is_refused_with_what_differs(pair, tmp_path, settings, named):
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    with pytest.raises(Killed):
        make(pair, checkpoint, KilledAfter(3))
    with pytest.raises(CalibrationError, match=f"another calibration: {named}.*delete it") as caught:
        make(pair, checkpoint, **settings)
    assert str(checkpoint.path) in str(caught.value)
    assert checkpoint.path.exists()


def test_a_checkpoint_of_other_models_is_refused_with_what_differs(pair, tmp_path):
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    with pytest.raises(Killed):
        make(pair, checkpoint, KilledAfter(3))
    with pytest.raises(CalibrationError, match="source model was .*target model was"):
        make((pair[1], pair[0]), checkpoint)


@pytest.mark.parametrize("change", ["a prompt", "shorter"])
def test_a_corpus_that_changed_is_refused(pair, tmp_path, change):
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    with pytest.raises(Killed):
        make(pair, checkpoint, KilledAfter(3))
    corpus = [[5, 6, 7], *CORPUS[1:]] if change == "a prompt" else CORPUS[:12]
    with pytest.raises(CalibrationError, match="words is not what it was when the checkpoint was written"):
        make(pair, checkpoint, corpus=corpus)


def test_a_checkpoint_that_cannot_be_read_is_refused(pair, tmp_path):
    checkpoint = Checkpoint(tmp_path / "pack", 1)
    make(pair, checkpoint)
    checkpoint.path.write_bytes(checkpoint.path.read_bytes()[:-100])
    with pytest.raises(CalibrationError, match="moments.safetensors cannot be read.*delete it"):
        make(pair, checkpoint)


def test_a_checkpoint_is_as_large_however_many_prompts_it_has_seen(pair, tmp_path):
    sizes = []
    for tokens in (100, 260):
        checkpoint = Checkpoint(tmp_path / str(tokens), 1)
        make(pair, checkpoint, tokens=tokens)
        sizes.append(checkpoint.path.stat().st_size)
        assert int(load_file(str(checkpoint.path))["key.count"]) >= tokens
    assert abs(sizes[0] - sizes[1]) < 64  # the numbers in its header


def words(out: Path) -> list[str]:
    """Arguments of `kvlift calibrate` on the tiny family, with a pass of some seconds."""
    return [
        "--source", str(FAMILY / "kvlift-tiny-small"), "--target", str(FAMILY / "kvlift-tiny-large"),
        "--data", "family:60", "--k", "1", "--rank", "24", "--tokens", "3000", "--stride", "3",
        "--accept-prompts", "2", "--checkpoint-tokens", "400", "--out", str(out), "--name", "pack",
    ]  # fmt: skip


def test_a_killed_command_goes_on_and_gives_the_same_files(tmp_path):
    """The real thing: SIGKILL in the middle of the pass, and the same command again."""
    app = typer.Typer()
    app.command()(command)
    checkpoint = Checkpoint(tmp_path / "killed")
    code = "from sglang_ext.cli import calibrate; import typer; typer.run(calibrate)"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words(tmp_path / "killed")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        while running.poll() is None and not checkpoint.path.exists():
            time.sleep(0.02)
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    assert checkpoint.path.exists() and not (tmp_path / "killed").exists()
    again, whole = (CliRunner().invoke(app, words(tmp_path / name)) for name in ("killed", "whole"))
    assert (again.exit_code, whole.exit_code) == (0, 0), again.output + whole.output
    assert "going on from a checkpoint" in again.stderr and "going on" not in whole.stderr
    for name in ("pack.json", "weights.safetensors"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"killed", "whole"}, "a checkpoint is left behind"
