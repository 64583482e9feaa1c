"""What a worker was told, carried to each of its processes in one environment variable."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

ENV = "KVLIFT_WORKER"


class WorkerSettings(BaseModel):
    """Settings of the plugin; the server's own settings stay SGLang's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    packs: tuple[str, ...] = Field((), description="pack folders whose target is this model")
    allow_bench_pack: bool = Field(False, description="also use packs of random weights, for measuring")
    acceptance_threshold: float = Field(0.8, ge=0, le=1, description="least recovered share of an acceptance record")
    rho: float = Field(0.3, ge=0, le=1, description="budget where a request names none")
    recompute_tokens: int | None = Field(
        None, gt=0, description="positions that lifts recompute in one step while decodes run; None: SGLang's chunk"
    )
    kernels: bool = Field(True, description="use the Triton kernels where the KV pool is on a CUDA device")
    lease_s: float = Field(10.0, gt=0, description="seconds that a lifted prefix stays locked for its request")
    transfer_timeout_s: float = Field(5.0, gt=0, description="seconds for export, transfer and lift together")
    transfer_max_bytes: int = Field(4 << 30, gt=0, description="largest block that is exported")
    kv_transport: Literal["shm", "mooncake", "auto"] = Field(
        "shm", description="how blocks travel: shared memory of one host, Mooncake, or whichever the other worker can"
    )
    kv_host: str | None = Field(None, description="Mooncake: the address at which other workers reach this one")
    kv_protocol: Literal["tcp", "rdma"] = Field("tcp", description="Mooncake: of its transfers")
    kv_device: str = Field("", description="Mooncake: RDMA devices, with commas; empty: all")
    kv_buffer_bytes: int = Field(1 << 30, gt=0, description="Mooncake: buffer for blocks on their way, both directions")

    documents: Literal["auto", "explicit", "off"] = Field(
        "auto", description="documents in chats: compiled on first sight, only by POST /v1/documents, or refused"
    )
    documents_adapters: tuple[str, ...] = Field((), description="folders of adapters that compile, one a method")
    documents_bytes: int = Field(1 << 30, ge=0, description="memory for compiled documents")
    documents_store: str | None = Field(
        None, description="keeps documents beyond memory, for all who name it: a folder, or mooncake://MASTER:PORT"
    )
    documents_store_bytes: int | None = Field(
        None, gt=0, description="size to which a folder is kept (16 GiB); memory given to a Mooncake store (1 GiB)"
    )
    documents_timeout_s: float = Field(60.0, gt=0, description="seconds for compiling a document, and for linking")

    @property
    def documents_store_is_remote(self) -> bool:
        """Whether `documents_store` is a service, and no folder."""
        return "://" in (self.documents_store or "")

    def publish(self) -> None:
        """Puts these settings where child processes find them."""
        os.environ[ENV] = self.model_dump_json()

    @classmethod
    def published(cls) -> WorkerSettings | None:
        """The settings of this process, or None where it is no kvlift worker."""
        text = os.environ.get(ENV)
        return cls.model_validate_json(text) if text else None
