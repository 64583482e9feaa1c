"""How a block gets from one worker to another.

Inside a host, from process to process: `SharedMemory`. Between two workers: a `Carrier`, which takes a block that is
published on one host and publishes it on the other. The scheduler knows only the first, so that no decode ever waits
for a network.
"""

from sglang_ext.worker.transport.base import Carrier, Transport
from sglang_ext.worker.transport.carriers import Carriers
from sglang_ext.worker.transport.shared_memory import SharedMemory

__all__ = ["Carrier", "Carriers", "SharedMemory", "Transport"]
