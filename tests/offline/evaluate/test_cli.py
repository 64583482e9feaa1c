"""The command: one JSON document and its plots, resumable; the acceptance record; and clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from sglang_ext.offline.evaluate import plans
from sglang_ext.offline.evaluate.cli import evaluate
from sglang_ext.offline.evaluate.errors import EvaluationError
from sglang_ext.offline.evaluate.session import Session
from sglang_ext.transfer.pack import read_manifest
from tests.kv.models import model_folder
from tests.worker.packs import noise_pack

ROW = {"source", "selector", "rho", "n", "accuracy", "retention", "p_vs_target", "template_share"}
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """Two models, a pack between them that may carry a record, and questions."""
    folder = tmp_path_factory.mktemp("house")
    source = model_folder(folder / "small", "qwen3", 2, layers=2)
    target = model_folder(folder / "large", "qwen3", 1)
    pack = noise_pack(source, target, folder / "pack")
    manifest = json.loads((pack / "pack.json").read_text())
    (pack / "pack.json").write_text(json.dumps({**manifest, "bench_only": False}))
    records = [
        {"_id": n, "input": "Who?", "answers": ["Ada"], "context": f"Ada has {n} {n * 7} cups."} for n in range(4)
    ]
    (folder / "q.jsonl").write_text("".join(json.dumps({**one, "dataset": "d"}) + "\n" for one in records))
    (folder / "c.jsonl").write_text("".join(json.dumps({"text": f"Ada has {n} cups."}) + "\n" for n in range(3)))
    return SimpleNamespace(folder=folder, pack=pack, common=["--target", str(target), "--pack", f"{pack}={source}"])


def call(*arguments: str):
    app = typer.Typer()
    app.command()(evaluate)
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def asked(house, tmp_path):
    return [*house.common, "--data", f"multihop:{house.folder / 'q.jsonl'}", "--out", str(tmp_path), "--seeds", "2"]


def test_it_writes_a_document_and_plots_and_finds_them_again(asked, tmp_path):
    first = call(*asked, "--coverage", "0.5")
    assert first.exit_code == 0, first.output
    found = json.loads((tmp_path / "evaluate.json").read_text())
    assert {"target", "sources", "rows"} <= set(found)
    assert found["target"]["n"] == 4 and set(found["sources"]) == {"small"}
    assert all(row.keys() >= ROW for row in found["rows"])
    ours = [row["rho"] for row in found["rows"] if row["selector"] == "rank_disagreement" and row["coverage"] is None]
    assert ours == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    [covered] = [row for row in found["rows"] if row["coverage"] == 0.5]
    assert 0 < covered["rho"] < 1
    assert all(len(row["seeds"]) == 2 for row in found["rows"] if row["selector"] == "random")
    plots = {path.name for path in (tmp_path / "evaluate").glob("*.png")}
    assert plots == {"accuracy.png", "selectors.png", "budgets.png", "layers.png", "strip.png"}
    assert all((tmp_path / "evaluate" / name).read_bytes()[:4] == PNG for name in plots)
    kept = {path: path.stat().st_size for path in (tmp_path / "evaluate" / "outcomes").iterdir()}
    second = call(*asked, "--coverage", "0.5")
    assert second.exit_code == 0
    assert json.loads((tmp_path / "evaluate.json").read_text()) == found
    assert {path: path.stat().st_size for path in kept} == kept


def test_fidelity_takes_any_corpus_and_answers_do_not(house, tmp_path):
    asked = [*house.common, "--data", f"corpus:{house.folder / 'c.jsonl'}", "--out", str(tmp_path), "--rho", "1"]
    refused = call(*asked)
    assert refused.exit_code == 1
    assert "--measure fidelity" in refused.output
    done = call(*asked, "--measure", "fidelity", "--compare-at", "0.5")
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "evaluate.json").read_text())
    full = next(row for row in found["rows"] if row["rho"] == 1.0)
    assert found["metric"] == "agreement"
    assert (full["accuracy"], full["kl"]) == (1.0, pytest.approx(0, abs=1e-3))


def test_accept_writes_the_record_into_the_pack_and_nothing_else(house, asked, tmp_path):
    before = read_manifest(house.pack)
    done = call(*asked, "--accept", "--accept-prompts", "3", "--accept-rho", "1.0")
    assert done.exit_code == 0, done.output
    after = read_manifest(house.pack)
    assert before.acceptance is None
    assert (after.acceptance.prompts, after.acceptance.rho) == (3, 1.0)
    assert after.acceptance.lifted.agreement == 1.0
    assert after.model_copy(update={"acceptance": None}) == before
    assert not (tmp_path / "evaluate.json").exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (["--data", ""], "--data is missing"),
        (["--target", ""], "--target is missing"),
        (["--pack", "folder"], "expected PACK_FOLDER=SOURCE_MODEL"),
        (["--data", "squad:x"], "'squad:x' is not known"),
        (["--selector", "magic"], "'magic' is not known"),
        (["--rho", "1.5"], "rho must lie in"),
        (["--preset", "paper"], "'paper' is not known; expected family"),
    ],
)
def test_what_does_not_fit_is_refused(asked, change, reason):
    done = call(*asked, *change)
    assert done.exit_code == 1
    assert f"kvlift: {reason}"[:20] in done.output or reason in " ".join(done.output.split())
    assert reason in " ".join(done.output.split())


def test_a_stop_by_the_user_says_what_is_kept(asked, monkeypatch):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "run", stop)
    done = call(*asked)
    assert done.exit_code == 130
    assert "the same command goes on" in " ".join(done.output.split())


def test_the_module_of_the_command_imports_nothing_heavy():
    code = (
        "import sys, sglang_ext.offline.evaluate.cli; print([m for m in ('torch', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def packs_named(folder, *names: str):
    for name in names:
        (folder / name).mkdir()
        (folder / name / "pack.json").write_text("{}")
    return folder


def test_the_familys_preset_takes_the_packs_that_there_are(tmp_path):
    names = ("tiny-small-to-large", "tiny-medium-to-large", "tiny-large-to-small")
    plan = plans.family_plan("family-dev:3", packs_named(tmp_path, *names))
    assert [folder.rpartition("/")[2] for folder, _, _ in plan.forward.pairs] == list(names[:2])
    compared, line = (arms for _, _, arms in plan.forward.pairs)
    assert {arm.kind for arm in line} == {"rank_disagreement"}
    assert set(line) < set(compared)
    assert plan.reverse.pairs[0][0].endswith(names[2])
    assert plan.reverse.target == plan.forward.pairs[0][1]
    assert plans.family_plan("family:1", packs_named(tmp_path / "..", names[0])).reverse is None


def test_the_familys_preset_needs_its_first_pack(tmp_path):
    with pytest.raises(EvaluationError, match="tiny-small-to-large"):
        plans.family_plan("family:1", tmp_path)
