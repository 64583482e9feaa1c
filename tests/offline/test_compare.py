"""The report over several structures is true of the packs that it compares."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from safetensors.torch import load_file

from sglang_ext.offline.compare import StructureRow, compare
from sglang_ext.transfer.maps import SIDES
from sglang_ext.transfer.pack import Pack
from tests.transfer.conftest import TARGET, random_maps
from tests.transfer.test_pack import arms, headed, manifest


@pytest.fixture
def packs():
    one = headed("full"), headed("head").model_copy(update={"acceptance": arms(lifted=0.6)})
    return [Pack(made, random_maps(structure=made.structure)) for made in one]


def test_a_row_counts_what_the_pack_holds(packs, tmp_path):
    for pack in packs:
        pack.save(tmp_path)
        loaded = Pack.load(tmp_path)
        row = StructureRow.of(loaded)
        maps = [sides[side] for sides in loaded.maps.layers for side in SIDES]
        assert row.structure == pack.manifest.structure
        assert row.parameters == sum(one.weight.numel() + TARGET.width for one in maps)
        written = load_file(str(tmp_path / "weights.safetensors"))
        assert row.bytes == sum(one.nbytes for name, one in written.items() if not name.endswith(".sources"))
        assert (row.r2_keys, row.r2_values) == (0.8, 0.8)
    full, head = (StructureRow.of(pack) for pack in packs)
    assert full.bytes - head.bytes == 4 * (full.parameters - head.parameters) > 0


def test_the_report_is_a_table_a_file_of_rows_and_a_picture(packs, tmp_path):
    console = Console(record=True, width=100)
    compare(packs, tmp_path, console)
    text = console.export_text()
    written = json.loads((tmp_path / "comparison.json").read_text())
    assert [row["structure"] for row in written["rows"]] == ["full", "head"]
    assert [row["recovered"] for row in written["rows"]] == [0.875, 0.5]
    assert [row["kl"] for row in written["rows"]] == pytest.approx([0.1, 0.4])
    assert {row["attention_cosine"] for row in written["rows"]} == {0.985}
    assert (written["source"], written["target"], written["k"], written["rank"]) == ("small", "large", 2, 3)
    for row in written["rows"]:
        assert f"{row['parameters']:,}" in text and f"{row['recovered']:,}" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_bench_only_packs_are_compared_without_a_record(tmp_path):
    bare = manifest(bench_only=True, acceptance=None)
    compare([Pack(bare, random_maps())] * 2, tmp_path, Console(quiet=True))
    row = json.loads((tmp_path / "comparison.json").read_text())["rows"][0]
    assert row["recovered"] is row["kl"] is row["attention_cosine"] is None
