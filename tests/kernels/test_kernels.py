"""Runs the kernels' laws in Triton's interpreter, and compiles the kernels for GPUs, each in a process of its own.

Triton decides when a kernel is defined whether it is interpreted, and remembers what it compiled, so that
neither can share this process with the other or with SGLang's kernels. Where there is a GPU, the same laws
run on it too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
LAWS = sorted(HERE.glob("laws_*.py"))


def run(files: list[Path], cache: Path, interpret: bool) -> None:
    """Runs files of this folder in one child pytest; its output is the failure."""
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *map(str, files)],
        cwd=HERE.parents[1], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.fail(f"interpret={interpret}:\n{done.stdout}\n{done.stderr}", pytrace=False)


def test_the_laws_hold_in_the_interpreter(tmp_path: Path):
    run(LAWS, tmp_path, interpret=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_the_laws_hold_on_the_gpu(tmp_path: Path):
    run(LAWS, tmp_path, interpret=False)


def test_the_kernels_compile_for_gpus(tmp_path: Path):
    run([HERE / "compiles_for_gpus.py"], tmp_path, interpret=False)
