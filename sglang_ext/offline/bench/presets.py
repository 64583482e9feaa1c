"""Sweeps by name."""

from __future__ import annotations

from sglang_ext.errors import PlanError
from sglang_ext.offline.bench.prefill import Sweep

# Each preset: shape -> sweeps. The time is nearly all in the longest prompts; they get fewer rounds.
PRESETS: dict[str, dict[str, tuple[Sweep, ...]]] = {
    "two-cores": {
        "qwen3-0.6b": (
            Sweep((149, 512, 1024, 2048)),
            Sweep((4096, 8192), rounds=2),
            Sweep((149,), batches=(2, 4, 8, 16), rhos=(0.3,), rounds=2),
            Sweep((512,), batches=(2, 4), rhos=(0.3,), rounds=2),
        ),
        "qwen3-1.7b": (Sweep((2048,), rhos=(0.3,)), Sweep((8192,), rhos=(0.3,), rounds=1)),
    },
    "gpu": {
        shape: (
            Sweep((149, 512, 1024, 2048, 4096, 8192), rounds=7),
            Sweep((149, 512, 2048), batches=(2, 4, 8, 16, 32), rhos=(0.2, 0.3), rounds=5),
        )
        for shape in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
    },
}


def preset_named(name: str) -> dict[str, tuple[Sweep, ...]]:
    """Raises PlanError for an unknown name."""
    if name not in PRESETS:
        raise PlanError(f"preset {name!r} is not known; expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
