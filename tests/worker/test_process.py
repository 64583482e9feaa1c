"""What a process checks before it serves lifts, and what it sets on a machine without CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_ext.errors import GeometryError, WorkerError
from sglang_ext.rope import RopeSpec, Rotation
from sglang_ext.worker import checks, launch
from sglang_ext.worker.settings import ENV, WorkerSettings
from tests.worker.conftest import SMALL
from tests.worker.servers import free_port

GOOD_ARGUMENTS = {
    "tokenizer_worker_num": 1, "tp_size": 1, "pp_size": 1, "dp_size": 1, "disable_radix_cache": False,
    "kv_cache_dtype": "auto", "kv_events_config": None, "speculative_algorithm": None,
    "disaggregation_mode": "null", "enable_hierarchical_cache": False,
}  # fmt: skip


def test_the_installed_release_is_the_one_the_hooks_were_made_for():
    checks.require(checks.release_checks())


def test_another_release_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "SGLANG_RELEASE", "9.9.9")
    with pytest.raises(WorkerError, match=r"0\.5\.23 is installed, but the hooks were made for 9\.9\.9"):
        checks.require(checks.release_checks())


@pytest.mark.parametrize("parameters", [("self", "other"), ("self", "recv_reqs", "more")])
def test_a_hook_point_that_looks_different_is_refused(monkeypatch: pytest.MonkeyPatch, parameters: tuple[str, ...]):
    target = "sglang.srt.managers.scheduler.Scheduler.process_input_requests"
    monkeypatch.setattr(checks, "HOOKED", {target: parameters})
    with pytest.raises(WorkerError, match="Scheduler.process_input_requests"):
        checks.require(checks.release_checks())


def test_hooks_that_are_not_live_are_refused():
    """Cases 73 and 74: this process never loaded the plugin."""
    with pytest.raises(WorkerError, match=f"not live in process {os.getpid()}"):
        checks.require(checks.live_checks())


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("tokenizer_worker_num", 2), ("tp_size", 2), ("pp_size", 2), ("dp_size", 2), ("disable_radix_cache", True),
        ("kv_cache_dtype", "fp8_e4m3"), ("kv_events_config", "{}"), ("speculative_algorithm", "EAGLE"),
        ("disaggregation_mode", "prefill"), ("enable_hierarchical_cache", True),
    ],
)  # fmt: skip
def test_a_server_that_keeps_kv_elsewhere_is_refused(argument: str, value: object):
    """Cases 55 and 56 among them: a pool of fp8, and more tensor-parallel ranks than KV heads."""
    checks.require(checks.server_checks(SimpleNamespace(**GOOD_ARGUMENTS)))
    changed = SimpleNamespace(**{**GOOD_ARGUMENTS, argument: value})
    [failed] = [check for check in checks.server_checks(changed) if not check.ok]
    with pytest.raises(WorkerError, match=failed.name):
        checks.require([failed])


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )  # fmt: skip


def test_a_plugin_that_cannot_work_ends_the_process():
    """Case 74: SGLang would log the failure and serve without the lift."""
    code = (
        "from sglang_ext.worker import checks; checks.SGLANG_RELEASE = '9.9.9'\n"
        "from sglang.srt.plugins import load_plugins; load_plugins(); print('went on')"
    )
    done = run(code, **{ENV: WorkerSettings().model_dump_json(), "SGLANG_USE_CPU_ENGINE": "1"})
    assert done.returncode == 1 and "went on" not in done.stdout
    assert "hooks were made for 9.9.9" in done.stderr


def test_a_hook_that_was_undone_after_loading_ends_the_process():
    """Case 73: what is live is looked at, not what was registered."""
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.managers.scheduler import Scheduler\n"
        "from sglang_ext.worker import checks; checks.require(checks.live_checks()); print('all live')\n"
        "Scheduler.flush_cache = Scheduler.flush_cache.__wrapped__\n"
        "checks.require(checks.live_checks())"
    )
    done = run(code, **{ENV: WorkerSettings().model_dump_json(), "SGLANG_USE_CPU_ENGINE": "1"})
    assert done.stdout.split("\n")[-2] == "all live" and done.returncode == 1
    assert "hook Scheduler.flush_cache: not live" in done.stderr


def test_fp8_kv_and_more_ranks_than_kv_heads_are_refused_at_start():
    """Cases 55 and 56, by the command itself: it names both, and never listens."""
    arguments = ["--kv-cache-dtype", "fp8_e4m3", "--tp-size", "4", "--port", str(free_port())]
    command = [sys.executable, "-m", "router.cli", "worker", "--model", str(SMALL), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "KV dtype: quantised KV needs scales" in done.stderr and "--tp-size must be 1" in done.stderr


def test_an_sglang_that_merely_has_kvlift_installed_is_left_alone():
    code = (
        "from sglang.srt.plugins import load_plugins; load_plugins()\n"
        "from sglang.srt.plugins.hook_registry import HookRegistry\n"
        "hooks = [hook for listed in HookRegistry._hooks.values() for _, hook, _ in listed]\n"
        "print(sum(hook.__module__.startswith('sglang_ext') for hook in hooks))"
    )
    assert run(code, SGLANG_USE_CPU_ENGINE="1").stdout.split()[-1] == "0"


def test_the_stand_in_fails_loudly_when_a_kernel_is_called():
    code = (
        "from sglang_ext.worker import platform; platform.install()\n"
        "import sgl_kernel\n"
        "try:\n    import sgl_kernel.scalar_type\nexcept ModuleNotFoundError:\n    print('no package')\n"
        "try:\n    sgl_kernel.rmsnorm(1)\nexcept RuntimeError as error:\n    print(error)"
    )
    out = run(code).stdout
    assert "no package" in out and "sgl_kernel.rmsnorm was called, but this machine has no CUDA" in out


def test_a_given_argument_is_never_overruled():
    added = launch.cpu_arguments(["--dtype=float16", "--device", "cpu"], overlap=False)
    assert "--dtype" not in added and "--device" not in added
    assert added[added.index("--attention-backend") + 1] == "torch_native" and "--sleep-on-idle" in added
    assert "--disable-overlap-schedule" in added
    assert "--disable-overlap-schedule" not in launch.cpu_arguments([], overlap=True)


@pytest.mark.parametrize(("flags", "native"), [("avx2 fma", False), ("avx512_bf16 avx2", True), ("amx_bf16", True)])
def test_bf16_is_chosen_only_where_the_cpu_has_it(tmp_path: Path, flags: str, native: bool):
    info = tmp_path / "cpuinfo"
    info.write_text(f"flags : {flags}\n")
    assert launch.has_native_bf16(info) is native


def test_a_cuda_machine_keeps_its_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch, "has_cuda", lambda: True)
    before = dict(os.environ)
    assert launch.prepare_environment(workers_on_host=2) is False
    assert dict(os.environ) == before


def test_settings_travel_through_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(ENV, raising=False)
    assert WorkerSettings.published() is None
    settings = WorkerSettings(packs=("a", "b"), rho=0.5, allow_bench_pack=True)
    monkeypatch.setenv(ENV, settings.model_dump_json())
    assert WorkerSettings.published() == settings


def rope_module(rope: RopeSpec, scale: float) -> torch.nn.Module:
    """A model whose only layer keeps cosines and sines as SGLang's rope does."""
    model = torch.nn.Module()
    model.cos_sin_cache = Rotation(rope).at(torch.arange(200)).table() * scale
    return model


def test_a_server_that_turns_keys_otherwise_is_refused():
    """SGLang reads yarn's length scale under another name: its keys would be off by a constant factor."""
    rope = RopeSpec("yarn", 1e4, 16, factor=4.0, original_max_position=64, attention_factor=1.3)
    checks.check_rope(rope_module(rope, 1.0), Rotation(rope))
    with pytest.raises(GeometryError, match="turns keys otherwise"):
        checks.check_rope(rope_module(rope, 1 / 1.3), Rotation(rope))
