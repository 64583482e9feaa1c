"""`kvlift worker`: a real SGLang server with the plugin, on whatever machine this is."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Sequence

from sglang_ext.errors import WorkerError
from sglang_ext.hub import local_folder
from sglang_ext.worker import checks
from sglang_ext.worker.checks import Check
from sglang_ext.worker.settings import WorkerSettings


def has_cuda() -> bool:
    """Whether this machine has a CUDA driver. Asked before torch is imported."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def cpu_environment(cores: int) -> dict[str, str]:
    """Environment that SGLang reads at import, for a worker without a GPU."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        # SGLang's bf16 rope cache on CPU would make keys that no exact inverse rotation undoes.
        "SGLANG_ROPE_CACHE_FP32": "1",
        "OMP_NUM_THREADS": str(cores),
        "MKL_NUM_THREADS": str(cores),
    }


def cpu_arguments(given: Sequence[str], overlap: bool) -> list[str]:
    """SGLang arguments for a worker without a GPU, less those that were given.

    overlap: keep SGLang's overlapped loop. It handles a batch's result after the next batch was launched, which on a CPU
    is after it was computed: each first token would wait for a stranger's prefill.
    """
    wanted = {
        "--device": ["cpu"],
        "--attention-backend": ["torch_native"],
        "--sampling-backend": ["pytorch"],
        "--dtype": ["bfloat16" if has_native_bf16() else "float32"],
        "--sleep-on-idle": [],
        **({} if overlap else {"--disable-overlap-schedule": []}),
    }
    names = {argument.split("=", 1)[0] for argument in given}
    return [part for name, value in wanted.items() if name not in names for part in (name, *value)]


def has_native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bf16 in hardware; emulated, it is a hundred times slower than fp32."""
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags or "amx_bf16" in flags or " bf16" in flags


def prepare_environment(workers_on_host: int) -> bool:
    """Sets what SGLang reads at import on a machine without CUDA, unless it is set; changes nothing on one
    with CUDA. Call before anything imports sglang. Returns whether the worker will run on the CPU.

    workers_on_host: how many workers share this machine's cores.
    """
    if has_cuda():
        return False
    cores = max(1, len(os.sched_getaffinity(0)) // max(1, workers_on_host))
    for name, value in cpu_environment(cores).items():
        os.environ.setdefault(name, value)
    return True


def process_checks(settings: WorkerSettings) -> list[Check]:
    """Loads the plugin into this process as SGLang would, and says what holds."""
    settings.publish()
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return checks.release_checks() + checks.live_checks()


def run_worker(
    model: str, arguments: Sequence[str], settings: WorkerSettings, workers_on_host: int, cpu_overlap: bool
) -> None:
    """Runs the server until it is stopped. Raises WorkerError where it cannot carry the plugin."""
    extra = cpu_arguments(arguments, cpu_overlap) if prepare_environment(workers_on_host) else []
    checks.require(process_checks(settings) + checks.transport_checks(settings))

    from sglang.srt.entrypoints.http_server import get_global_state, launch_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    args = prepare_server_args(["--model-path", model, "--enable-cache-report", *extra, *arguments])
    folder = local_folder(model, args.revision)
    checks.require(checks.server_checks(args) + checks.model_checks(str(folder)))
    checks.require(checks.adapter_checks(settings.documents_adapters, str(folder), args.chat_template))

    def require_live_scheduler() -> None:
        if "kvlift" not in get_global_state().scheduler_info:
            raise WorkerError("the scheduler process came up without kvlift's hooks")

    try:
        launch_server(args, launch_callback=require_live_scheduler)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
