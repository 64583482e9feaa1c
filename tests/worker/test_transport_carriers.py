"""Which way a block takes: shared memory where both workers see the same, Mooncake otherwise, or a reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sglang_ext.errors import TransferError, WorkerError
from sglang_ext.worker import checks
from sglang_ext.worker.settings import WorkerSettings
from sglang_ext.worker.transport import Carriers, SharedMemory, engine
from sglang_ext.worker.transport.shared_memory import SameHost


class Elsewhere(SameHost):
    """Stands for Mooncake where only the choice matters."""

    name = "mooncake"
    remote = True

    def owns(self, handle: str) -> bool:
        return handle.startswith("far-")

    def drop(self, handle: str) -> None:
        self.dropped = handle


def carriers(memory: SharedMemory, mode: str) -> Carriers:
    found = {"shm": [SameHost(memory)], "mooncake": [Elsewhere(memory)], "auto": [SameHost(memory), Elsewhere(memory)]}
    return Carriers(memory, found[mode])


CHOSEN = {
    ("shm", "shm"): ("shm", None),
    ("shm", "mooncake"): (None, None),
    ("shm", "auto"): ("shm", None),
    ("mooncake", "mooncake"): ("mooncake", "mooncake"),
    ("mooncake", "auto"): ("mooncake", "mooncake"),
    ("auto", "auto"): ("shm", "mooncake"),
}
"""Of a source and a target, either way round: the transport on one host, and between two."""


@pytest.mark.parametrize(("modes", "chosen"), CHOSEN.items())
def test_the_best_way_that_both_have_is_taken(tmp_path: Path, modes: tuple[str, str], chosen: tuple[str | None, ...]):
    memory = SharedMemory(1 << 20, tmp_path)
    for source, target in (modes, modes[::-1]):
        offering, reading = carriers(memory, source), carriers(memory, target)
        for place, wanted in zip((reading.place, "another host"), chosen, strict=True):
            if wanted is None:
                with pytest.raises(TransferError, match="no common transport"):
                    offering.shared_with(reading.names, place)
            else:
                assert offering.shared_with(reading.names, place).name == reading.named(wanted).name == wanted


def test_a_reader_that_names_no_place_sees_this_memory(tmp_path: Path):
    assert carriers(SharedMemory(1, tmp_path), "auto").shared_with(["shm"], None).name == "shm"


def test_a_transport_that_the_target_lacks_is_refused_by_name(tmp_path: Path):
    with pytest.raises(TransferError, match=r"through 'pigeon'; this worker takes \['shm'\]"):
        carriers(SharedMemory(1, tmp_path), "shm").named("pigeon")


def test_a_handle_is_dropped_where_it_belongs(tmp_path: Path):
    both = carriers(SharedMemory(1 << 20, tmp_path), "auto")
    path = tmp_path / f"kvlift-1-{'0' * 32}"
    path.write_bytes(b"x")
    both.drop("far-1")
    assert both.named("mooncake").dropped == "far-1" and path.exists()
    both.drop(path.name)
    assert not path.exists()
    with pytest.raises(TransferError, match="not a block handle"):
        both.drop("../etc/passwd")


def test_shared_memory_alone_never_loads_mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    settings = WorkerSettings()
    checks.require(checks.transport_checks(settings))
    assert Carriers.started(SharedMemory(1, tmp_path), settings).names == ["shm"]


@pytest.mark.parametrize("mode", ["mooncake", "auto"])
def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch, mode: str):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    settings = WorkerSettings(kv_transport=mode, kv_host="10.0.0.1")
    with pytest.raises(WorkerError, match=r"install kvlift\[mooncake\] and Debian's package libibverbs1"):
        checks.require(checks.transport_checks(settings))


@pytest.mark.parametrize(("devices", "wanted"), [([], ""), (["mlx5_0"], "mlx5_7"), (["mlx5_0"], "mlx5_0,mlx5_7")])
def test_a_missing_rdma_device_is_refused_and_never_replaced_by_tcp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: list[str], wanted: str
):
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    for name in devices:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(engine, "RDMA_DEVICES", tmp_path)
    settings = WorkerSettings(kv_transport="mooncake", kv_host="10.0.0.1", kv_protocol="rdma", kv_device=wanted)
    with pytest.raises(WorkerError, match="no RDMA device"):
        checks.require(checks.transport_checks(settings))


@pytest.mark.parametrize("host", [None, "", "two words", "http://10.0.0.1", "::1"])
def test_a_host_that_others_cannot_use_is_refused(host: str | None):
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with pytest.raises(WorkerError, match="needs --kv-host"):
        checks.require(checks.transport_checks(WorkerSettings(kv_transport="mooncake", kv_host=host)))
    with pytest.raises(WorkerError, match="--documents-store mooncake://master:1 needs --kv-host"):
        checks.require(checks.transport_checks(WorkerSettings(documents_store="mooncake://master:1", kv_host=host)))
    checks.require(checks.transport_checks(WorkerSettings(kv_transport="mooncake", kv_host="worker-3.internal")))


def test_a_store_of_documents_that_is_no_mooncake_masters_is_refused():
    pytest.importorskip("mooncake.engine", exc_type=ImportError)
    with pytest.raises(WorkerError, match="'redis://here' is no Mooncake store; expected mooncake://HOST:PORT"):
        checks.require(checks.transport_checks(WorkerSettings(documents_store="redis://here", kv_host="10.0.0.1")))
