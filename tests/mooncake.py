"""Whether Mooncake can be loaded here, and a master of its store."""

from __future__ import annotations

import ctypes.util
import importlib.util
import socket
import subprocess
import time
from pathlib import Path

from tests.worker.servers import free_port

HAS_MOONCAKE = importlib.util.find_spec("mooncake") is not None and ctypes.util.find_library("ibverbs") is not None
_STARTS_S = 30


class StoreMaster:
    """A `mooncake_master` on loopback, until `stop`."""

    def __init__(self, folder: Path) -> None:
        self.port, self._admin_port = free_port(), free_port()
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None and spec.submodule_search_locations
        program = Path(next(iter(spec.submodule_search_locations))) / "mooncake_master"
        options = [
            f"-rpc_port={self.port}", "-rpc_address=127.0.0.1", f"-metrics_port={self._admin_port}",
            "-metrics_host=127.0.0.1", "-enable_metric_reporting=false",
        ]  # fmt: skip
        with (folder / "master.log").open("w") as log:
            self._process = subprocess.Popen([program, *options], stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + _STARTS_S
        while not (_listens(self.port) and _listens(self._admin_port)):
            assert self._process.poll() is None and time.monotonic() < deadline, (folder / "master.log").read_text()
            time.sleep(0.05)

    @property
    def url(self) -> str:
        return f"mooncake://127.0.0.1:{self.port}?admin={self._admin_port}"

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
