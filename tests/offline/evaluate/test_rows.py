"""Laws of the table: each figure of a row is what its definition gives, from outcomes written by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_ext.offline.evaluate.arms import Arm
from sglang_ext.offline.evaluate.datasets.items import Dataset, Item
from sglang_ext.offline.evaluate.datasets.scoring import token_f1
from sglang_ext.offline.evaluate.rows import document
from sglang_ext.offline.evaluate.run import Results
from sglang_ext.offline.evaluate.significance import mcnemar
from sglang_ext.offline.evaluate.store import Outcome, packed, unpacked
from sglang_ext.offline.evaluate.template import Template

LENGTH, COUNT = 10, 8
NONE, SOME = Arm("rank_disagreement"), Arm("rank_disagreement", 0.3)
RANDOM = [Arm("random:0", 0.3), Arm("random:1", 0.3)]
COVERED = Arm("rank_disagreement", coverage=0.5)


def outcomes(right: str, positions: tuple[int, ...] = ()) -> list[Outcome]:
    """One per item: `1` is right, `0` is wrong."""
    bits = packed(torch.tensor(positions, dtype=torch.int64), LENGTH)
    return [
        Outcome(item=str(n), text="yes" if one == "1" else "no", recomputed=bits, length=LENGTH)
        for n, one in enumerate(right)
    ]


@pytest.fixture(scope="module")
def found():
    items = tuple(Item(str(n), f"t{n % 2}", {}, ("yes",), token_f1, "accuracy", 1) for n in range(COUNT))
    lifted = {
        NONE: outcomes("00000010"), SOME: outcomes("11110110", (0, 1, 5)), COVERED: outcomes("11110000", (4, 5, 6, 7)),
        RANDOM[0]: outcomes("10000010", (0, 1)), RANDOM[1]: outcomes("00000010", (0, 6)),
    }  # fmt: skip
    results = Results(
        Dataset("d", items, {"bad": 2}), [[0] * LENGTH] * COUNT, {f"t{n}": Template(2, 1, frozenset()) for n in (0, 1)},
        outcomes("11111110"), {"small": outcomes("11100000")}, [lifted], [[]],
    )  # fmt: skip
    model = SimpleNamespace(identity=SimpleNamespace(model="digest"))
    pack = SimpleNamespace(manifest=SimpleNamespace(name="pack"))
    pair = SimpleNamespace(source=SimpleNamespace(name="small", executor=model), pack=pack, agreement_rho=None)
    evaluation = SimpleNamespace(pairs=[pair], target=SimpleNamespace(name="large", executor=model))
    return document(evaluation, results)


@pytest.fixture
def rows(found):
    return {(row.selector, row.rho, row.coverage): row for row in found.rows}


def test_the_models_alone(found):
    assert (found.target.accuracy, found.target.n, found.sources["small"].accuracy) == (7 / 8, 8, 3 / 8)
    assert found.sources["small"].tasks["t0"].accuracy == 2 / 4
    assert (found.metric, found.dropped) == ("accuracy", {"bad": 2})


def test_retention_gap_and_significance(rows):
    row = rows["rank_disagreement", 0.3, None]
    assert row.accuracy == 6 / 8
    assert row.retention == pytest.approx(6 / 7, abs=1e-5)
    assert row.gap_closed == pytest.approx((6 - 1) / (7 - 1), abs=1e-5)
    assert row.p_vs_target == mcnemar(1, 0)
    assert row.tasks["t1"].accuracy == 3 / 4
    plain = rows["rank_disagreement", 0.0, None]
    assert (plain.gap_closed, plain.p_vs_target) == (0.0, mcnemar(6, 0))


def test_seeds_are_averaged_and_compared_as_one(rows):
    random = rows["random", 0.3, None]
    assert (random.seeds, random.accuracy) == ([2 / 8, 1 / 8], 1.5 / 8)
    assert random.p_vs_random is None
    assert 0 < rows["rank_disagreement", 0.3, None].p_vs_random < 1
    assert rows["rank_disagreement", 0.0, None].p_vs_random is None


def test_the_share_in_the_template_is_of_the_chosen_positions(rows):
    assert rows["rank_disagreement", 0.3, None].template_share == pytest.approx(2 / 3, abs=1e-5)
    assert rows["random", 0.3, None].template_share == 3 / 4  # of both seeds
    assert rows["rank_disagreement", 0.0, None].template_share is None


def test_a_coverage_reports_the_share_that_was_computed(rows):
    [row] = [row for row in rows.values() if row.coverage == 0.5]
    assert row.rho == 5 / LENGTH  # four chosen, and the last position
    assert row.p_vs_random is None


@pytest.mark.parametrize("length", [1, 4, 5, 64, 131])
def test_positions_come_back_as_they_were_packed(length):
    positions = torch.arange(0, length, 3)
    back = unpacked(packed(positions, length), length)
    assert back.nonzero().flatten().tolist() == positions.tolist()
    assert len(back) == length
