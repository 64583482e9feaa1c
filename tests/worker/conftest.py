"""Workers and models, once per session of tests."""

from __future__ import annotations

import random
from importlib.resources import files
from pathlib import Path
from typing import Iterator

import pytest
import torch

from sglang_ext.offline.executor import TransformersExecutor
from tests.worker.packs import identity_pack, noise_pack
from tests.worker.servers import Worker
from tests.worker.smollm2 import smollm2

FAMILY = Path(str(files("sglang_ext"))) / "offline" / "family"
SMALL = FAMILY / "models" / "kvlift-tiny-small"
LARGE = FAMILY / "models" / "kvlift-tiny-large"
PACK = FAMILY / "packs" / "tiny-small-to-large"
HEAD_PACK = FAMILY / "packs" / "tiny-small-to-large-head"
STEP_POSITIONS = 4


class Fleet:
    """All workers of the session: small and large of the family, SmolLM2, and one large with pages of 16.

    The last one recomputes few positions a step while it decodes.
    """

    def __init__(self, folder: Path) -> None:
        identity = identity_pack(LARGE, folder / "identity")
        noise = noise_pack(SMALL, LARGE, folder / "noise")
        smol = smollm2()
        # The scheduler's log level keeps one line per batch, which failed tests print.
        self.small = Worker("small", SMALL, folder)
        self.large = Worker("large", LARGE, folder, [PACK, HEAD_PACK, identity, noise])
        paged = ["--page-size", "16", "--recompute-tokens", str(STEP_POSITIONS), "--prefill-max-requests", "2"]
        self.paged = Worker("paged", LARGE, folder, [PACK, identity], paged, api_key="secret")
        self.smol = Worker("smol", smol, folder, [identity_pack(smol, folder / "smol-identity")])
        self.all = (self.small, self.large, self.paged, self.smol)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    started = Fleet(tmp_path_factory.mktemp("workers"))
    try:
        for worker in started.all:
            worker.wait()
        yield started
    finally:
        for worker in started.all:
            worker.stop()


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
