"""Where the worker's operations on KV tensors come from, and that no layer of a forward waits for the device."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from router.cli import build
from sglang_ext.worker import launch, ops
from sglang_ext.worker.ops import TorchOps, ops_on
from sglang_ext.worker.settings import WorkerSettings

WORKER = Path(ops.__file__).parent


@pytest.mark.parametrize(
    ("device", "kernels", "name"),
    [("cuda", True, "triton"), ("cuda:1", True, "triton"), ("cuda", False, "torch"), ("cpu", True, "torch"),
     ("cpu", False, "torch")],
)  # fmt: skip
def test_triton_is_chosen_on_cuda_unless_it_is_switched_off(device: str, kernels: bool, name: str):
    assert ops_on(torch.device(device), kernels).name == name


@pytest.mark.parametrize(("words", "kernels"), [([], True), (["--kernels"], True), (["--no-kernels"], False)])
def test_the_option_reaches_the_settings(monkeypatch: pytest.MonkeyPatch, words: list[str], kernels: bool):
    given: list[tuple[list[str], WorkerSettings]] = []
    monkeypatch.setattr(launch, "run_worker", lambda _, rest, settings, *others: given.append((rest, settings)))
    done = CliRunner().invoke(build(), ["worker", "--model", "m", *words, "--page-size", "16"])
    assert done.exit_code == 0, done.output
    [(rest, settings)] = given
    assert (settings.kernels, rest) == (kernels, ["--page-size", "16"])


def test_a_worker_without_a_gpu_never_imports_the_kernels():
    code = """
import sys, torch
from sglang_ext.worker.ops import ops_on
for device, kernels in (("cpu", True), ("cpu", False), ("cuda", False), ("cuda", True)):
    ops_on(torch.device(device), kernels)
    print(any(name.startswith("sglang_ext.kernels") for name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False", "True"]


class NoHost(TorchDispatchMode):
    """Fails where an operation reads a tensor that is not on the device, or moves one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        tensors += [one for one in torch.utils._pytree.tree_leaves(out) if isinstance(one, torch.Tensor)]
        assert all(one.device.type == "meta" for one in tensors), f"{func} reads or writes the host"
        return out


def test_no_layer_of_a_forward_copies_between_host_and_device():
    """On torch's meta device, from which nothing can be read back."""
    counts, lengths = (30, 5), (40, 7)
    positions = [torch.arange(length - count, length) for count, length in zip(counts, lengths)]
    slots = [torch.empty(length, dtype=torch.int64, device="meta") for length in lengths]
    attention = TorchOps().attention(positions, slots, 2)
    query = torch.empty(sum(counts), 4, 8, device="meta")
    keys, values = torch.empty(2, 60, 2, 8, device="meta")
    received: list[torch.Tensor] = []
    with NoHost():
        mixed = attention(query, keys, values, 0.3, received)
    assert mixed.shape == query.shape and mixed.device.type == "meta"
    assert [len(one) for one in received] == list(lengths)


def test_the_worker_never_imports_the_offline_package():
    for file in WORKER.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("sglang_ext.offline") for name in names), f"{file.name} imports {names}"
