"""The `sgl_kernel` stand-in for machines without CUDA (entry point group `sglang.srt.platforms`).

SGLang imports `sgl_kernel` unconditionally, and its wheel fails to import where there is no CUDA
driver. On the CPU engine with the torch-native backends none of its functions is called, so a module
that imports and has nothing in it is enough; if one is called after all, the error says so.
"""

from __future__ import annotations

import importlib
import os
import sys
import types


def activate() -> None:
    """Called inside `import sglang`, before anything imports `sgl_kernel`.

    Returns None in any case, which leaves SGLang's own platform in charge.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    try:
        importlib.import_module("sgl_kernel")
    except ImportError:
        install()


def install() -> None:
    """Puts the stand-in into sys.modules, over whatever a failed import left there."""
    for name in [name for name in sys.modules if name == "sgl_kernel" or name.startswith("sgl_kernel.")]:
        del sys.modules[name]
    stand_in = types.ModuleType("sgl_kernel", "kvlift's stand-in: this machine has no CUDA.")
    # A plain module, not a package: SGLang asks for submodules and falls back when there are none.
    stand_in.__getattr__ = _missing
    sys.modules["sgl_kernel"] = stand_in


def is_stand_in() -> bool:
    module = sys.modules.get("sgl_kernel")
    return module is not None and getattr(module, "__getattr__", None) is _missing


def _missing(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def unavailable(*_args, **_kwargs):
        raise RuntimeError(
            f"sgl_kernel.{name} was called, but this machine has no CUDA and kvlift's stand-in has no such "
            "kernel: use --attention-backend torch_native and --sampling-backend pytorch"
        )

    return unavailable
