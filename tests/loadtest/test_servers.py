"""What a worker counts between two looks."""

from __future__ import annotations

import pytest

from loadtest.errors import LoadTestError
from loadtest.servers import Counted, Worker
from tests.loadtest.conftest import serving
from tests.loadtest.pair import worker

NATIVE = {"prefill_batches": 4, "prefill_requests": 10, "lift_batches": 0, "lifts": 0}
LIFTED = {"prefill_batches": 9, "prefill_requests": 16, "lift_batches": 2, "lifts": 6}


def test_a_difference_is_of_both_looks():
    assert Counted(LIFTED).since(Counted(NATIVE)).values == {
        "prefill_batches": 5, "prefill_requests": 6, "lift_batches": 2, "lifts": 6,
    }  # fmt: skip
    assert Counted(LIFTED).since(Counted({})).values == Counted({}).since(Counted(LIFTED)).values == {}


def test_the_batches_of_a_lift_are_those_that_repair():
    """Each lifted request is also a prefill, of its last token."""
    assert (Counted(NATIVE).mean_batch, Counted(NATIVE).batches) == (2.5, 4)
    assert (Counted(LIFTED).mean_batch, Counted(LIFTED).batches) == (3.0, 2)
    assert Counted({}).mean_batch is None and Counted({}).batches is None
    assert Counted(dict.fromkeys(NATIVE, 0)).mean_batch is None


def test_who_a_worker_is():
    with worker(name="large") as url:
        asked = Worker(f"{url}/", threads=2)
        assert (asked.served.model, asked.served.url, asked.served.threads) == ("large", url, 2)
        assert asked.counted().values["lifts"] == 0
        asked.flush()


def test_what_is_no_worker_is_told():
    with serving() as server, pytest.raises(LoadTestError, match="is no kvlift worker"):
        Worker(server.url)
    with pytest.raises(LoadTestError, match="is the server running"):
        Worker("http://127.0.0.1:9")
