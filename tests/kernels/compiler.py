"""Compiles what the wrappers would launch, for GPUs that this machine does not have.

Triton asks its driver for the target, hands it the binary and then launches. OfflineDriver answers the
first question, keeps to the device's limits, and launches nothing. It belongs into a process of its own:
Triton remembers what it compiled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable

from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime import driver

# Bytes of shared memory that a block may ask for, by compute capability.
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024}


class OfflineDriver:
    """A driver of a GPU that is not there. The capability is also the device's number, and Triton's cache key."""

    def __init__(self, capability: int) -> None:
        self._capability = capability
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_MEMORY[capability]},
            load_binary=lambda name, binary, shared, device: (object(), object(), 0, 0, 1024),
            unload_module=lambda module: None,
        )

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        return lambda *launch: None


def compiled(kernel: Any, capability: int, launch: Callable[[], object]) -> CompiledKernel:
    """The one specialisation of `kernel` that `launch` compiles. Raises OutOfResources beyond the device's limits."""
    driver.set_active(OfflineDriver(capability))
    kernel.device_caches.clear()
    launch()
    (found,) = kernel.device_caches[capability][0].values()
    return found
