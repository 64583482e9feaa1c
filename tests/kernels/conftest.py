"""Fixtures of the files that run a kernel; test_kernels.py says which process runs which file."""

from __future__ import annotations

import pytest
import triton

from tests.kv.builders import one_thread  # noqa: F401


@pytest.fixture(autouse=True, scope="session")
def interpreter():
    """Where kernels are interpreted, bfloat16 does what it does on a device."""
    if not triton.knobs.runtime.interpret:
        yield
        return
    from tests.kernels.interpreter import faithful_bfloat16

    with faithful_bfloat16():
        yield
