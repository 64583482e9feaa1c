"""Triton 3.8's interpreter cuts float32 off to bfloat16, multiplies the bits of bfloat16 operands, and knows no BF16x3.

Devices round to nearest and multiply the numbers. For these operations the tests make it do the same; a
product of float32 numbers it computes in float32, whatever the precision asked for.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import (
    InterpreterBuilder,
    InterpreterOptions,
    TensorHandle,
    interpreter_builder,
)


@contextmanager
def faithful_bfloat16() -> Iterator[None]:
    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def rounding_cast(self: Any, source: TensorHandle, target: Any) -> TensorHandle:
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return TensorHandle(_rounded(source.data), target.scalar)
        return cast(self, source, target)

    def number_dot(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return dot(self, _widened(a), _widened(b), *rest)

    precisions = (*InterpreterOptions.allowed_dot_input_precisions, "bf16x3")
    with (
        patch.object(InterpreterBuilder, "cast_impl", rounding_cast),
        patch.object(InterpreterBuilder, "create_dot", number_dot),
        patch.object(interpreter_builder, "options", InterpreterOptions(allowed_dot_input_precisions=precisions)),
    ):
        yield


def _rounded(data: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16, ties to even."""
    return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def _widened(one: TensorHandle) -> TensorHandle:
    if one.dtype.scalar != tl.bfloat16:
        return one
    return TensorHandle((one.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
