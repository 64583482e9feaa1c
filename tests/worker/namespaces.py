"""Two hosts on one machine: network namespaces, joined by a cable of two virtual interfaces."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from typing import Iterator

import pytest


class Host:
    """One network namespace. `run` is what a command line begins with to run there."""

    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        self.run = ["ip", "netns", "exec", name]
        self._interface = f"{name}e"

    def slow_down(self, mbit: int) -> None:
        """Lets no more than so much leave this host."""
        rate = ["rate", f"{mbit}mbit", "burst", "64kb", "latency", "400ms"]
        _do(*self.run, "tc", "qdisc", "replace", "dev", self._interface, "root", "tbf", *rate)

    def speed_up(self) -> None:
        _do(*self.run, "tc", "qdisc", "del", "dev", self._interface, "root")

    def connect(self, up: bool) -> None:
        """Plugs the cable in, or pulls it: then nothing comes back, not even an error."""
        _do("ip", "-n", self.name, "link", "set", self._interface, "up" if up else "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Hosts that see only each other. Skips the test where network namespaces are not permitted."""
    hosts = tuple(Host(f"kv{side}{os.getpid()}", f"10.231.77.{number}") for number, side in enumerate("ab", 1))
    if shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("two hosts need iproute2 (ip, tc), which is not installed")
    with ExitStack() as undo:
        try:
            for host in hosts:
                _do("ip", "netns", "add", host.name)
                undo.callback(_do, "ip", "netns", "del", host.name)
            ends = [f"{host.name}e" for host in hosts]
            _do("ip", "link", "add", ends[0], "netns", hosts[0].name, "type", "veth",
                "peer", "name", ends[1], "netns", hosts[1].name)  # fmt: skip
            for host, end in zip(hosts, ends, strict=True):
                _do("ip", "-n", host.name, "address", "add", f"{host.address}/24", "dev", end)
                for interface in ("lo", end):
                    _do("ip", "-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        yield hosts[0], hosts[1]


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
