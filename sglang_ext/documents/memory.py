"""What KV gradient checkpointing saves: peak memory and time of one training step, with it and without (table 3).

Each case runs in a process of its own on random weights of a real shape: peaks of one process cannot be told apart, and
neither figure depends on what the weights are.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_ext.errors import DocumentError

WAYS = ("direct", "checkpointed")
INLINE = 64  # tokens of the query
ANSWER = 16
# Freed blocks go back to the system at once, so that the resident set is what is alive and not what malloc keeps.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


@dataclass(frozen=True)
class Shape:
    """A Qwen3 model."""

    layers: int = 8
    hidden: int = 512
    mlp: int = 1536
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    vocabulary: int = 4096


@dataclass(frozen=True)
class Case:
    """One step of SemPIC on `documents` documents of `tokens` tokens each, and a query, in float32."""

    way: str
    tokens: int
    documents: int = 4
    shape: Shape = Shape()
    device: str = "cpu"


@dataclass(frozen=True)
class MemoryRow:
    """The field names are the keys of the JSON file.

    peak_mb: over what the model and its adapter take; lower: the share by which it is below direct's.
    """

    way: str
    documents: int
    tokens: int
    peak_mb: float
    seconds: float
    loss: float
    lower: float | None = None


def measure(case: Case, threads: int = 1) -> MemoryRow:
    """Runs a case in a child process."""
    command = [sys.executable, "-m", "sglang_ext.documents.memory", json.dumps(asdict(case))]
    environment = {**os.environ, **_ALLOCATOR, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DocumentError(f"{case} ended with {done.returncode}: {done.stderr[-2000:]}")
    return MemoryRow(**json.loads(done.stdout.splitlines()[-1]))


def compared(rows: list[MemoryRow]) -> list[MemoryRow]:
    """The same rows, those of the checkpointed way with the share by which their peak is lower."""
    peaks = {(row.documents, row.tokens): row.peak_mb for row in rows if row.way == "direct"}
    found = []
    for row in rows:
        peak = peaks.get((row.documents, row.tokens))
        lower = round(1 - row.peak_mb / peak, 3) if peak and row.way != "direct" else None
        found.append(MemoryRow(**{**asdict(row), "lower": lower}))
    return found


def run_case(case: Case) -> MemoryRow:
    """One forward and backward of the student in this process."""
    import torch

    from sglang_ext.documents import checkpointing
    from sglang_ext.documents.corpus import Record
    from sglang_ext.documents.distil import distillation_loss
    from sglang_ext.documents.settings import TrainSettings
    from sglang_ext.documents.trainable import Trainable

    executor = _random_executor(case)
    trainable = Trainable(executor, TrainSettings(method="sempic"))
    student = trainable.student(getattr(checkpointing, case.way))
    drawn = torch.Generator().manual_seed(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(case.shape.vocabulary, (count,), generator=drawn).tolist())

    record = Record((*((ids(case.tokens), True) for _ in range(case.documents)), (ids(INLINE), False)))
    answer = list(ids(ANSWER))
    target = torch.randn(ANSWER, case.shape.vocabulary, generator=drawn).to(case.device)
    gc.collect()
    peak = _Peak(case.device)
    started = time.perf_counter()
    [logits] = student.logits([record], [answer])
    loss = distillation_loss(target, logits)
    loss.backward()
    value = loss.item()
    seconds = time.perf_counter() - started
    return MemoryRow(case.way, case.documents, case.tokens, round(peak.megabytes(), 1), round(seconds, 2), value)


class _Peak:
    """The highest memory in use since it was made, over what was in use then."""

    def __init__(self, device: str) -> None:
        import torch

        self._cuda = torch.device(device).type == "cuda"
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._base = float(torch.cuda.memory_allocated())
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
            self._base = _resident("VmRSS")

    def megabytes(self) -> float:
        import torch

        peak = float(torch.cuda.max_memory_allocated()) if self._cuda else _resident("VmHWM")
        return (peak - self._base) / 1e6


def _resident(field: str) -> float:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _random_executor(case: Case):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from sglang_ext.identity import ModelIdentity
    from sglang_ext.offline.executor import TransformersExecutor

    shape = case.shape
    config = Qwen3Config(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=case.documents * case.tokens + 1024,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float().to(case.device)
    return TransformersExecutor(model, ModelIdentity("random", "none", "none"))


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    print(json.dumps(asdict(run_case(Case(**{**given, "shape": Shape(**given["shape"])})))))
