"""Workers and models, once per session of tests."""

from __future__ import annotations

import random
from importlib.resources import files
from pathlib import Path
from typing import Iterator

import pytest
import torch

from router.config import Traces
from sglang_ext.offline.executor import TransformersExecutor
from tests.mooncake import HAS_MOONCAKE, StoreMaster
from tests.worker.adapters import random_adapters
from tests.worker.packs import identity_pack, noise_pack
from tests.worker.servers import Worker
from tests.worker.smollm2 import smollm2

FAMILY = Path(str(files("sglang_ext"))) / "offline" / "family"
SMALL = FAMILY / "models" / "kvlift-tiny-small"
LARGE = FAMILY / "models" / "kvlift-tiny-large"
PACK = FAMILY / "packs" / "tiny-small-to-large"
HEAD_PACK = FAMILY / "packs" / "tiny-small-to-large-head"
THINKING_TEMPLATE = Path(__file__).parent / "thinking.jinja"
STEP_POSITIONS = 4


class Fleet:
    """All workers of the session: small and large of the family, SmolLM2, and one large with pages of 16.

    The last one runs SGLang's overlapped loop, as on a GPU, recomputes few positions a step while it decodes, sends several
    tokens in one chunk, and exchanges blocks through Mooncake alone, where that is installed; small and large choose. SmolLM2's template is like Qwen3's. Small and
    large write their spans to `traces`. Large and paged share the folder `documents`, before which paged has memory for
    a few only, and adapters of every method; small has memory for a few before a Mooncake store; SmolLM2 compiles none
    by itself.
    """

    def __init__(self, folder: Path) -> None:
        identity = identity_pack(LARGE, folder / "identity")
        noise = noise_pack(SMALL, LARGE, folder / "noise")
        smol = smollm2()
        self.traces = folder / "traces.jsonl"
        small, large = (Traces(file=self.traces).worker_arguments(name) for name in ("small", "large"))
        self.documents = folder / "documents"
        stored = ["--documents-store", str(self.documents)]
        # The scheduler's log level keeps one line per batch, which failed tests print.
        self._master = StoreMaster(folder) if HAS_MOONCAKE else None
        kept = [] if self._master is None else ["--documents-store", self._master.url, "--documents-bytes", "600000"]
        self.small = Worker("small", SMALL, folder, arguments=[*small, *kept, *carried_by("auto")])
        self.large = Worker(
            "large", LARGE, folder, [PACK, HEAD_PACK, identity, noise], [*large, *stored, *carried_by("auto")]
        )
        paged = ["--page-size", "16", "--recompute-tokens", str(STEP_POSITIONS), "--prefill-max-requests", "2"]
        paged += [*carried_by("mooncake"), "--cpu-overlap"]
        paged += ["--stream-interval", "4", *stored, "--documents-bytes", "600000"]
        self.adapters = random_adapters(LARGE, folder / "adapters")
        paged += [part for adapter in self.adapters.values() for part in ("--documents-adapter", str(adapter))]
        self.paged = Worker("paged", LARGE, folder, [PACK, identity], paged, api_key="secret")
        of_smol = identity_pack(smol, folder / "smol-identity", THINKING_TEMPLATE)
        thinking = ["--chat-template", str(THINKING_TEMPLATE), "--documents", "explicit"]
        self.smol = Worker("smol", smol, folder, [of_smol], thinking)
        self.all = (self.small, self.large, self.paged, self.smol)

    def stop(self) -> None:
        for worker in self.all:
            worker.stop()
        if self._master is not None:
            self._master.stop()


def carried_by(transport: str) -> list[str]:
    """Options of a worker whose blocks go that way; none where Mooncake is not installed."""
    if not HAS_MOONCAKE:
        return []
    return ["--kv-transport", transport, "--kv-host", "127.0.0.1", "--kv-buffer-bytes", str(64 << 20)]


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    started = Fleet(tmp_path_factory.mktemp("workers"))
    try:
        for worker in started.all:
            worker.wait()
        yield started
    finally:
        started.stop()


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test that uses workers starts with empty caches, and ends with all of them alive.

    A leak of slots would end a worker: SGLang's strict memory checks run at each idle and busy step.
    """
    if "fleet" not in request.fixturenames:
        yield
        return
    workers = request.getfixturevalue("fleet").all
    for worker in workers:
        worker.flush()
    yield
    for worker in workers:
        assert worker.alive(), f"{worker.name} died:\n{worker.tail()}"


@pytest.fixture(scope="session")
def reference() -> dict[str, TransformersExecutor]:
    """The same models in transformers, fp32."""
    torch.set_num_threads(1)
    folders = {"small": SMALL, "large": LARGE, "smol": smollm2()}
    return {name: TransformersExecutor.from_folder(folder) for name, folder in folders.items()}


@pytest.fixture
def prompt():
    """prompt(n, seed): n token ids that both models of the family, and SmolLM2, know."""

    def make(length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(300, 800) for _ in range(length)]

    return make
