"""Laws of the moments: any split, any order, about the mean, and back from a saved state to the bit."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.transfer.moments import Moments
from tests.kv.builders import laws, random, same_bits


@laws
@given(data=st.data())
def test_any_split_in_any_order_gives_the_same_moments(data):
    x, y = random(0, 40, 6) * 5 + 2, random(1, 40, 3)
    whole = Moments(6, 3)
    whole.add(x, y)
    edges = sorted(data.draw(st.sets(st.integers(1, 39), max_size=5)))
    spans = data.draw(st.permutations(list(zip([0, *edges], [*edges, 40]))))
    parts = Moments(6, 3)
    for start, stop in spans:
        parts.add(x[start:stop], y[start:stop])
    for one, other in zip(whole.centred(), parts.centred()):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-12, atol=1e-9)


def test_centred_moments_are_those_about_the_mean():
    x, y = random(0, 40, 6) + 100, random(1, 40, 3) - 50
    moments = Moments(6, 3)
    moments.add(x, y)
    found = moments.centred()
    x, y = x.double(), y.double()
    centred_x, centred_y = x - x.mean(0), y - y.mean(0)
    torch.testing.assert_close(found.xx, centred_x.T @ centred_x, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.xy, centred_x.T @ centred_y, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.yy, centred_y.square().sum(0), rtol=0, atol=1e-6)
    assert found.count == 40


def test_a_restored_state_goes_on_to_the_bit():
    x, y = random(0, 40, 6) * 5 + 2, random(1, 40, 3)
    whole, before, after = (Moments(6, 3) for _ in range(3))
    for start in range(0, 40, 8):
        whole.add(x[start : start + 8], y[start : start + 8])
        (before if start < 16 else after).add(x[start : start + 8], y[start : start + 8])
        if start == 8:
            after.restore(before.state())
    assert not same_bits(before.xx, whole.xx)
    for one, other in zip(whole.state().values(), after.state().values(), strict=True):
        assert same_bits(one, other)
