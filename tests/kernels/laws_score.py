"""Laws of the map kernel: entries and scores are those of SideMap, however the columns are shared out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.kernels import score
from sglang_ext.transfer.maps import SideMap
from tests.kernels.builders import dtypes, few, on_device, seeds


@dataclass
class Case:
    centred: torch.Tensor
    side: SideMap

    def run(self, scores: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries and scores, the latter added to `scores` in place."""
        scores = self.centred.new_zeros(len(self.centred), dtype=torch.float32) if scores is None else scores
        side = self.side
        entries = score.map_and_score(
            self.centred, side.weight, side.prediction_mean, side.basis, scores, len(side.sources)
        )
        return entries, scores

    def run_in_torch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """In float32, so that only the kernel rounds."""
        side = self.side
        wide = SideMap(side.sources, side.weight.float(), side.bias, side.input_mean, side.basis)
        z = wide.project(self.centred.float())
        return z + wide.prediction_mean, wide.disagreement(z)


def case_of(
    count: int, sources: int, source_dim: int, heads: int, dim: int, rank: int, structure: str = "full",
    dtype: torch.dtype = torch.float32, seed: int = 0,
) -> Case:  # fmt: skip
    """source_dim: width of a source layer per target head; rank r <= heads * dim."""
    inputs, d_t = sources * source_dim, heads * dim
    shape = (inputs * heads, d_t) if structure == "full" else (heads, inputs, dim)
    weight = (on_device(*shape, seed=seed) / inputs**0.5).to(dtype)
    basis = torch.linalg.qr(on_device(d_t, d_t, seed=seed + 1)).Q[:, :rank].contiguous()
    side = SideMap(
        tuple(range(sources)), weight, on_device(d_t, seed=seed + 2), on_device(inputs * heads, seed=seed + 3), basis
    )
    return Case(on_device(count, inputs * heads, seed=seed + 4, dtype=dtype), side)


@st.composite
def cases(draw) -> Case:
    heads, dim = draw(st.integers(1, 2)), draw(st.sampled_from([16, 24, 64, 96]))
    rank = draw(st.one_of(st.integers(0, min(40, heads * dim)), st.just(heads * dim)))
    return case_of(
        draw(st.integers(1, 80)), draw(st.integers(1, 3)), draw(st.sampled_from([8, 32, 48])), heads, dim, rank,
        draw(st.sampled_from(["full", "head"])), draw(dtypes), draw(seeds),
    )  # fmt: skip


def assert_equals_torch(case: Case) -> None:
    entries, scores = case.run()
    expected_entries, expected_scores = case.run_in_torch()
    torch.testing.assert_close(entries, expected_entries, rtol=1e-5, atol=1e-5)
    # The score is a difference of two energies, so that its error is relative to them.
    energy = float((expected_entries - case.side.prediction_mean).square().sum(-1).max())
    torch.testing.assert_close(scores, expected_scores, rtol=1e-4, atol=1e-6 + 1e-5 * energy)
    assert bool((scores >= 0).all())


@few
@given(case=cases())
def test_it_equals_the_torch_version(case):
    assert_equals_torch(case)


@pytest.mark.parametrize("programs", [1, 3, 128])
@pytest.mark.parametrize("structure", ["full", "head"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_however_the_columns_are_shared_out(monkeypatch, programs, structure, dtype):
    """From one program that walks over all columns, with large tiles where it may, to one per tile."""
    monkeypatch.setattr(score, "PROGRAMS", programs)
    assert_equals_torch(case_of(131, 2, 40, 3, 64, 20, structure, dtype))


@pytest.mark.parametrize("rank", [0, 1, 16, 127, 128, 129, 255, 256])
def test_every_rank(rank):
    assert_equals_torch(case_of(20, 1, 32, 2, 128, rank))


def test_a_basis_of_the_whole_space_adds_exactly_nothing():
    case = case_of(33, 2, 32, 2, 32, 64)
    scores = on_device(33, seed=9)
    before = scores.clone()
    case.run(scores)
    assert torch.equal(scores, before)


def test_what_lies_in_the_basis_has_no_energy_outside():
    case = case_of(33, 2, 32, 2, 32, 24)
    case.side.weight.copy_(case.side.weight @ case.side.basis @ case.side.basis.T)
    entries, scores = case.run()
    assert float(scores.min()) == 0  # rounding alone would make some of them negative
    assert float(scores.max()) <= 1e-5 * float((entries - case.side.prediction_mean).square().sum(-1).max())


@few
@given(case=cases(), seed=seeds)
def test_scores_are_added(case, seed):
    held = on_device(len(case.centred), seed=seed)
    (_, alone), (_, added) = case.run(), case.run(held.clone())
    assert torch.equal(added, held + alone)


@few
@given(case=cases(), data=st.data())
def test_a_token_does_not_depend_on_the_others(case, data):
    row = data.draw(st.integers(0, len(case.centred) - 1))
    before = case.run()
    case.centred[torch.arange(len(case.centred)) != row] = torch.nan
    after = case.run()
    assert torch.equal(before[0][row], after[0][row]) and torch.equal(before[1][row], after[1][row])


def test_a_head_reads_only_its_own_head_of_each_source_layer():
    case = case_of(20, 3, 32, 2, 32, 8, "head")
    before, _ = case.run()
    case.centred.view(20, 3, 2, 32)[:, :, 1] = 7.0
    after, _ = case.run()
    assert torch.equal(before[:, :32], after[:, :32])
    assert bool((before[:, 32:] != after[:, 32:]).all())


def test_features_may_lie_with_gaps_and_nothing_but_the_scores_is_mutated():
    case = case_of(20, 2, 32, 2, 32, 8)
    wide = torch.cat([case.centred, torch.full_like(case.centred, torch.nan)], 1)
    strided = Case(wide[:, : case.centred.shape[1]], case.side)
    held = [t.clone() for t in (case.centred, case.side.weight, case.side.basis, case.side.prediction_mean)]
    assert all(map(torch.equal, strided.run(), case.run()))
    assert all(map(torch.equal, held, (strided.centred, case.side.weight, case.side.basis, case.side.prediction_mean)))


def test_no_tokens_give_no_entries():
    entries, scores = case_of(0, 1, 32, 1, 32, 8).run()
    assert (entries.shape, len(scores)) == ((0, 32), 0)
