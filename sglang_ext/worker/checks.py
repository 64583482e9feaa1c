"""What must hold before a process serves lifts. `kvlift doctor` prints the same list."""

from __future__ import annotations

import inspect
import os
import pkgutil
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Mapping, NamedTuple, Sequence

import torch

from sglang_ext.documents.mooncake_storage import Master
from sglang_ext.errors import DocumentError, GeometryError, KVLiftError, WorkerError
from sglang_ext.identity import ModelIdentity
from sglang_ext.rope import Rotation
from sglang_ext.worker.settings import WorkerSettings

SGLANG_RELEASE = "0.5.23"
_HOST = re.compile(r"[0-9A-Za-z.-]+")

# Where the plugin hooks in, and the parameters that it relies on.
HOOKED: Mapping[str, tuple[str, ...]] = {
    "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher": ("self",),
    "sglang.srt.managers.scheduler.Scheduler.process_input_requests": ("self", "recv_reqs"),
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": ("self", "empty_cache"),
    "sglang.srt.managers.scheduler.Scheduler.get_init_info": ("self",),
    "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin.init_communicators": ("self",),
    "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend._run_sdpa_forward_extend": (
        "self", "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens",
        "extend_prefix_lens", "extend_seq_lens", "encoder_lens", "scaling", "enable_gqa", "causal",
        "is_cross_attn", "sliding_window_size",
    ),
    "sglang.srt.managers.scheduler.Scheduler.run_batch": ("self", "batch", "pp_proxy_tensors"),
    "sglang.srt.model_executor.model_runner.ModelRunner.forward": (
        "self", "forward_batch", "skip_attn_backend_init", "pp_proxy_tensors", "reinit_attn_backend", "split_forward_count",
    ),
    "sglang.srt.managers.scheduler.Scheduler.is_fully_idle": ("self", "for_health_check", "ignore_waiting"),
    "sglang.srt.managers.scheduler_components.pool_stats_observer.SchedulerPoolStatsObserver.session_held_tokens": (
        "self",
    ),
    "sglang.srt.observability.trace.get_otlp_span_exporter": ("endpoint",),
}  # fmt: skip


class Check(NamedTuple):
    """One fact about this process."""

    name: str
    ok: bool
    detail: str


def release_checks() -> list[Check]:
    """The installed SGLang is the one the hooks were made for, and its hook points look as they did."""
    try:
        found = version("sglang")
    except PackageNotFoundError:
        return [Check("sglang", False, "not installed; install kvlift[worker]")]
    checks = [
        Check(
            "sglang release", found == SGLANG_RELEASE,
            found if found == SGLANG_RELEASE else f"{found} is installed, but the hooks were made for {SGLANG_RELEASE}",
        )
    ]  # fmt: skip
    return checks + [_parameters(target, expected) for target, expected in HOOKED.items()]


def live_checks() -> list[Check]:
    """Every hook point's live callable in this process is ours (cases 72 to 74)."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    checks = []
    for target in HOOKED:
        ours = any(hook.__module__.startswith("sglang_ext.") for _, hook, _ in HookRegistry._hooks.get(target, ()))
        wrapped = hasattr(pkgutil.resolve_name(target), "__wrapped__")
        detail = f"live in process {os.getpid()}" if ours and wrapped else f"not live in process {os.getpid()}"
        checks.append(Check(f"hook {_short(target)}", ours and wrapped, detail))
    return checks


def server_checks(args: Any) -> list[Check]:
    """The server's arguments leave the KV in a layout and in processes that the plugin can reach.

    args: SGLang's ServerArgs, resolved.
    """
    wanted: list[tuple[str, bool, str]] = [
        ("tokenizer workers", args.tokenizer_worker_num == 1, "--tokenizer-worker-num must be 1"),
        ("tensor parallel", args.tp_size == 1, "--tp-size must be 1 in this release of kvlift"),
        ("pipeline parallel", args.pp_size == 1, "--pp-size must be 1"),
        ("data parallel", args.dp_size == 1, "--dp-size must be 1; run several workers behind the router"),
        ("radix cache", not args.disable_radix_cache, "--disable-radix-cache leaves nothing to lift into"),
        ("KV dtype", args.kv_cache_dtype in ("auto", "bf16", "bfloat16"), "quantised KV needs scales"),
        ("KV events", not args.kv_events_config, "--kv-events-config ignores namespaces: mapped KV would leak"),
        ("speculation", not args.speculative_algorithm, "speculative decoding keeps KV that a map cannot make"),
        ("disaggregation", args.disaggregation_mode == "null", "prefill/decode disaggregation is not supported"),
        ("hierarchical cache", not args.enable_hierarchical_cache, "--enable-hierarchical-cache is not supported"),
    ]  # fmt: skip
    return [Check(name, holds, "ok" if holds else why) for name, holds, why in wanted]


def transport_checks(settings: WorkerSettings) -> list[Check]:
    """What the chosen way between hosts needs is here."""
    if settings.kv_transport == "shm" and not settings.documents_store_is_remote:
        return []
    from sglang_ext.worker.transport.engine import require_library

    try:
        require_library(settings.kv_protocol, settings.kv_device)
    except WorkerError as error:
        return [Check("Mooncake", False, str(error))]
    if settings.documents_store_is_remote:
        try:
            Master.parse(settings.documents_store or "")
        except DocumentError as error:
            return [Check("documents store", False, str(error))]
    host = settings.kv_host or ""
    asks = f"--documents-store {settings.documents_store}"
    if settings.kv_transport != "shm":
        asks = f"--kv-transport {settings.kv_transport}"
    wanted = f"{asks} needs --kv-host: the name or IPv4 address at which other workers reach this one"
    detail = host if _HOST.fullmatch(host) else f"{wanted}, not {host!r}"
    return [Check("Mooncake", True, settings.kv_protocol), Check("KV host", detail == host, detail)]


def adapter_checks(folders: Sequence[str], model: str, template_file: str | None) -> list[Check]:
    """What documents are compiled by was made for this model, and no two for the same method."""
    if not folders:
        return []
    try:
        from sglang_ext.documents.adapter import read_weights
    except ImportError as error:
        return [Check("documents adapter", False, f"{error}; install kvlift[documents]")]
    identity, methods = ModelIdentity.from_folder(model, template_file), []
    for folder in folders:
        try:
            methods.append(read_weights(folder, identity).manifest.settings.method)
        except DocumentError as error:
            return [Check("documents adapter", False, str(error))]
    again = sorted({method for method in methods if methods.count(method) > 1})
    detail = f"two adapters are for method {again[0]!r}; a worker takes one of each" if again else ", ".join(methods)
    return [Check("documents adapter", not again, detail)]


def model_checks(folder: str) -> list[Check]:
    """The model's KV layout and rope are ones that blocks can hold."""
    from sglang_ext.geometry import KVGeometry

    try:
        g = KVGeometry.from_folder(folder)
    except (KVLiftError, OSError, KeyError) as error:
        return [Check("KV layout", False, str(error))]
    layout = f"{g.layers} layers, {g.kv_heads} KV heads of {g.head_dim}, rope {g.rope.kind}"
    return [Check("KV layout", True, layout)]


def check_rope(model: Any, rotation: Rotation) -> None:
    """Raises GeometryError unless the served model turns its keys as `rotation` does.

    model: SGLang's, a torch module. SGLang reads some rope parameters under other names than transformers
    does; a worker that turned keys differently would hand out wrong blocks without any error.
    """
    for module in model.modules():
        table = getattr(module, "cos_sin_cache", None)
        if table is None:
            continue
        positions = torch.tensor([0, 1, 7, 100, len(table) - 1]).clamp_max(len(table) - 1)
        wanted = rotation.at(positions).table()
        found = table[positions].float().cpu()
        if not getattr(module, "is_neox_style", True) or found.shape != wanted.shape:
            raise GeometryError(f"rope module {type(module).__name__} is not supported: expected NeoX style halves")
        # On CPUs without the fp32 setting the table is bf16: one part in 256.
        if not torch.allclose(found, wanted.cpu(), atol=1e-2):
            raise GeometryError(
                f"SGLang turns keys otherwise than the configuration says (rope {rotation.spec.kind}, off by "
                f"{float((found - wanted.cpu()).abs().max()):.3f}): this model cannot exchange KV"
            )


def require(checks: list[Check]) -> None:
    """Raises WorkerError that names every check that failed."""
    failed = [f"{check.name}: {check.detail}" for check in checks if not check.ok]
    if failed:
        raise WorkerError("this process cannot carry kvlift's plugin: " + "; ".join(failed))


def _parameters(target: str, expected: tuple[str, ...]) -> Check:
    name = f"hook point {_short(target)}"
    try:
        found = tuple(inspect.signature(pkgutil.resolve_name(target)).parameters)
    except (ImportError, AttributeError) as error:
        return Check(name, False, f"not found: {error}")
    detail = "as expected" if found == expected else f"has parameters {found}, expected {expected}"
    return Check(name, found == expected, detail)


def _short(target: str) -> str:
    return ".".join(target.split(".")[-2:])
