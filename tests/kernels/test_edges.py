"""The wrappers' edges: tensors that do not fit are refused before a launch, and plans cover every query once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.errors import GeometryError
from sglang_ext.kernels.attention import ROWS, frontier_attention, plan_tiles
from sglang_ext.kernels.gather import gather_unrotated
from sglang_ext.kernels.scatter import scatter_rotated
from sglang_ext.kernels.score import map_and_score
from tests.kv.builders import laws

SOURCES = Path(__file__).resolve().parents[2] / "sglang_ext"


@laws
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4), group=st.integers(1, 8), data=st.data()
)  # fmt: skip
def test_tiles_hold_every_query_once_and_end_at_its_frontier(lengths, group, data):
    positions = [torch.tensor(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))) for n in lengths]
    plan = plan_tiles(positions, [torch.arange(n) + 1000 * i for i, n in enumerate(lengths)], group)
    seen = []
    for first, stop, begin, frontier in plan.tiles.tolist():
        assert 0 < (stop - first) * group <= ROWS
        assert frontier == int(plan.positions[stop - 1]) + 1
        # The slots it reads are those of its own prompt, from position 0 on.
        prompt = next(i for i in range(len(lengths)) if first < sum(map(len, positions[: i + 1])))
        assert plan.slots[begin : begin + frontier].tolist() == [1000 * prompt + i for i in range(frontier)]
        seen += range(first, stop)
    assert sorted(seen) == list(range(sum(map(len, positions))))
    assert plan.tiles[:, 3].tolist() == sorted(plan.tiles[:, 3].tolist(), reverse=True)


def test_a_plan_is_refused_whose_positions_descend_or_have_no_slot():
    slots = [torch.arange(5)]
    with pytest.raises(GeometryError, match="prompt 0 descend"):
        plan_tiles([torch.tensor([3, 1])], slots, 1)
    with pytest.raises(GeometryError, match="positions 0 to 5, but its slots are those of positions 0 to 4"):
        plan_tiles([torch.tensor([0, 5])], slots, 1)
    with pytest.raises(GeometryError, match="positions -1 to 2"):
        plan_tiles([torch.tensor([-1, 2])], slots, 1)
    with pytest.raises(GeometryError, match="no position to compute"):
        plan_tiles([torch.tensor([], dtype=torch.int64)], slots, 1)
    with pytest.raises(GeometryError, match="65 query heads per KV head"):
        plan_tiles([torch.tensor([0])], slots, 65)
    with pytest.raises(GeometryError, match="positions of 0 prompts"):
        plan_tiles([], [], 1)
    with pytest.raises(GeometryError, match="slots of prompt 0 is torch.int32, expected torch.int64"):
        plan_tiles([torch.tensor([0])], [torch.arange(5, dtype=torch.int32)], 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": (3, 4, 32)}, r"query has shape \[3, 4, 32\], expected \[2, 4, 32\]"),
        ({"query": (2, 3, 32)}, r"query has shape \[2, 3, 32\], expected \[2, 4, 32\]"),
        ({"values": (9, 1, 32)}, r"values has shape \[9, 1, 32\], expected \[10, 2, any\]"),
        ({"query": (2, 4, 512), "keys": (10, 2, 512)}, "512 and 32 dimensions, expected at most 256"),
    ],
)
def test_attention_refuses_what_does_not_fit(change, message):
    shapes = {"query": (2, 4, 32), "keys": (10, 2, 32), "values": (10, 2, 32)} | change
    plan = plan_tiles([torch.tensor([0, 4])], [torch.arange(5)], 2)
    with pytest.raises(GeometryError, match=message):
        frontier_attention(*(torch.zeros(shape) for shape in shapes.values()), plan, 1.0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"values": []}, "1 key buffers and 0 value buffers"),
        ({"values": [torch.zeros(9, 2, 16)]}, r"value buffer of layer 0 has shape \[9, 2, 16\]"),
        ({"table": torch.zeros(3, 32)}, r"rotation table has shape \[3, 32\], expected \[4, any\]"),
        ({"table": torch.zeros(4, 34)}, "width 34.*at most head_dim = 32"),
        ({"table": torch.zeros(4, 7)}, "width 7"),
        ({"slots": torch.arange(4, dtype=torch.int32)}, "slots is torch.int32"),
        ({"keys": [torch.zeros(9, 2, 32, dtype=torch.int8)]}, "key buffer of layer 0 is torch.int8"),
        ({"keys": [torch.zeros(9, 2, 64)[..., ::2]]}, "stride 2 in its last dimension"),
    ],
)
def test_gather_refuses_what_does_not_fit(change, message):
    given = {
        "keys": [torch.zeros(9, 2, 32)], "values": [torch.zeros(9, 2, 32)], "slots": torch.arange(4),
        "table": torch.zeros(4, 32),
    }  # fmt: skip
    with pytest.raises(GeometryError, match=message):
        gather_unrotated(**{**given, **change})


@pytest.mark.parametrize(
    "name, tensor, message",
    [
        ("keys", torch.zeros(3, 2, 32), r"keys has shape \[3, 2, 32\], expected \[4, any, any\]"),
        ("keys", torch.zeros(4, 2, 32).bfloat16(), "keys is torch.bfloat16, expected torch.float32"),
        ("values", torch.zeros(4, 2, 16), r"values has shape \[4, 2, 16\]"),
        ("table", torch.zeros(4, 64), "width 64"),
        ("key_buffer", torch.zeros(9, 1, 32), r"key buffer has shape \[9, 1, 32\], expected \[any, 2, 32\]"),
        ("value_buffer", torch.zeros(9, 2, 32).bfloat16(), "value buffer is torch.bfloat16, expected torch.float32"),
    ],
)
def test_scatter_refuses_what_does_not_fit(name, tensor, message):
    given = {
        "keys": torch.zeros(4, 2, 32), "values": torch.zeros(4, 2, 32), "table": torch.zeros(4, 32),
        "slots": torch.arange(4), "key_buffer": torch.zeros(9, 2, 32), "value_buffer": torch.zeros(9, 2, 32),
    }  # fmt: skip
    with pytest.raises(GeometryError, match=message):
        scatter_rotated(**{**given, name: tensor})


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("features", torch.zeros(5, 60), r"features has shape \[5, 60\], expected \[any, 64\]"),
        ("features", torch.zeros(5, 64).bfloat16(), "features is torch.bfloat16, expected torch.float32"),
        ("prediction_mean", torch.zeros(16), r"prediction_mean has shape \[16\], expected \[32\]"),
        ("basis", torch.zeros(16, 8), r"basis has shape \[16, 8\], expected \[32, any\]"),
        ("scores", torch.zeros(4), r"scores has shape \[4\], expected \[5\]"),
        ("sources", 3, "64 features per head, expected a multiple of the 3 source layers"),
        ("weight", torch.zeros(64), r"weight has shape \[64\]"),
    ],
)
def test_map_and_score_refuses_what_does_not_fit(name, value, message):
    given = {
        "features": torch.zeros(5, 64), "weight": torch.zeros(64, 32), "prediction_mean": torch.zeros(32),
        "basis": torch.zeros(32, 8), "scores": torch.zeros(5), "sources": 2,
    }  # fmt: skip
    with pytest.raises(GeometryError, match=message):
        map_and_score(**{**given, name: value})


def test_a_rank_beyond_the_registers_is_refused():
    with pytest.raises(GeometryError, match="rank r = 1100, expected at most 1024, or d_t = 1200"):
        map_and_score(
            torch.zeros(2, 4), torch.zeros(4, 1200), torch.zeros(1200), torch.zeros(1200, 1100), torch.zeros(2), 1
        )


def test_only_the_kernels_import_triton():
    for file in SOURCES.rglob("*.py"):
        found = {
            name.split(".")[0]
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [alias.name for alias in node.names] if isinstance(node, ast.Import)
                else [node.module or ""] if isinstance(node, ast.ImportFrom)
                else []
            )
        }  # fmt: skip
        assert "triton" not in found or file.parent.name == "kernels", f"{file.relative_to(SOURCES)} imports triton"


def test_importing_the_kernels_touches_no_device():
    modules = ", ".join(f"sglang_ext.kernels.{name}" for name in ("attention", "gather", "scatter", "score"))
    ask = "from triton.runtime import driver; print(driver._active, torch.cuda.is_initialized())"
    code = f"import torch, {modules}; {ask}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "False"]
