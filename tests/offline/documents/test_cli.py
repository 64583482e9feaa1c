"""The command: one JSON document, plots, resumable; and clear refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from sglang_ext.offline.documents.cli import evaluate
from tests.kv.models import model_folder
from tests.worker.packs import noise_pack

ROW = {"task", "method", "budget", "n", "micro_f1", "recovery", "ttft_ms", "flops", "exact_match", "kl"}
DATA = ["--data", "documents-3x2:2", "--data", "biographies:2"]
SMALL = ["--share", "0.5", "--leading", "2", "--map-share", "0", "--map-share", "0.3", "--attention", "1"]


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    folder = tmp_path_factory.mktemp("house")
    source = model_folder(folder / "small", "qwen3", 2, layers=2)
    reader = model_folder(folder / "large", "qwen3", 1)
    pack = noise_pack(source, reader, folder / "pack")
    return ["--model", str(reader), "--pack", f"{pack}={source}"]


def call(*arguments: str):
    app = typer.Typer()
    app.command()(evaluate)
    return CliRunner().invoke(app, list(arguments))


def test_it_writes_a_document_and_plots_and_finds_them_again(house, tmp_path):
    first = call(*house, *DATA, *SMALL, "--out", str(tmp_path))
    assert first.exit_code == 0, first.output
    found = json.loads((tmp_path / "documents.json").read_text())
    assert {row["task"] for row in found["rows"]} == {"3x2", "biography"}
    methods = {row["method"] for row in found["rows"]}
    assert {
        "full",
        "no_recompute",
        "no_cache",
        "epic",
        "random",
        "cache_blend",
        "a3",
        "mapped",
        "mapped_random",
    } == methods
    assert all(row.keys() >= ROW and row["missed"] == 0 for row in found["rows"])
    assert {row["task"] for row in found["attention"]} == {"3x2", "biography"}
    drawn = {path.stem for path in (tmp_path / "documents").glob("*.png")}
    assert {"efficiency_exact", "efficiency_micro_f1", "methods_exact", "mapped", "peaks"} <= drawn
    again = call(*house, *DATA, *SMALL, "--out", str(tmp_path))
    assert again.exit_code == 0, again.output
    assert json.loads((tmp_path / "documents.json").read_text()) == found  # the times too: nothing was measured again


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "--model and --data are missing"),
        (["--preset", "huge"], "'huge' is not known"),
        ([*DATA, "--rule", "magic"], "'magic' is not known"),
        ([*DATA, "--share", "2"], "share of the documents"),
        ([*DATA, "--pack", "nothing"], "PACK_FOLDER=SOURCE_MODEL"),
        (["--data", "family:2"], "has no documents"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(house, tmp_path, arguments, reason):
    given = [*house, *arguments] if "--data" in arguments else arguments
    found = call(*given, "--out", str(tmp_path))
    assert found.exit_code == 1
    assert reason in found.output


def test_importing_the_command_imports_nothing_heavy():
    code = "import sys, sglang_ext.offline.documents.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
