"""The load pair's folder, for those who must not import torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rich.console import Console

from router.errors import SuperviseError


def load_pair(console: Console) -> Path:
    """Made by a process of its own, once. Raises SuperviseError where that fails."""
    console.print("the load pair: random weights, a 120M target and a 20M source; made once, then kept")
    command = [sys.executable, "-m", "router.cli", "bench", "make-pair"]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SuperviseError(f"the load pair could not be made: `kvlift bench make-pair` ended with {done.returncode}")
    return Path(done.stdout.strip().splitlines()[-1])
