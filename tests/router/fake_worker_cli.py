"""Stands in for `kvlift worker` under `kvlift up`: a scripted worker with children of its own, as SGLang has.

`up` finds it through an entry point, as it finds the real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

worker = typer.Typer()
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


@worker.callback(
    invoke_without_command=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def run(
    context: typer.Context,
    model: Annotated[str, typer.Option()],
    port: Annotated[int, typer.Option()],
    served_model_name: Annotated[str, typer.Option()],
    pids: Annotated[Path, typer.Option()],
) -> None:
    """`--model broken` dies at once; else serves, with three children: plain, in its own session, deaf to SIGTERM."""
    if model == "broken":
        sys.exit("this worker is broken")
    import uvicorn

    from tests.router.fake_worker import FakeWorker

    children = [
        subprocess.Popen(["sleep", "600"]),
        subprocess.Popen(["sleep", "600"], start_new_session=True),
        subprocess.Popen([sys.executable, "-S", "-c", STUBBORN]),
    ]
    with pids.open("a") as file:
        file.write("\n".join(str(pid) for pid in [os.getpid(), *(child.pid for child in children)]) + "\n")
        file.write(f"args {' '.join(context.args)}\n")
    uvicorn.run(FakeWorker(served_model_name).app(), port=port, log_level="warning")
