"""`kvlift loadtest report`: everything that a run shows, made anew from its rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from loadtest.errors import BadRun, NotMeasured
from loadtest.page import page
from loadtest.plots import pictures
from loadtest.rows import Row
from loadtest.run import Run, RunFolder, Served
from loadtest.summary import Summary, summarise
from loadtest.tables import Table, as_csv, tables

TITLE = "What users feel when load rises, with and without the lift"


def report(folder: RunFolder, ttft_limit_s: float, console: Console) -> Summary:
    """Writes summary.json, table.md, rows.csv, the PNGs and report.html beside the rows, and shows the tables.

    Raises `BadRun` or `BadRows`, and `NotMeasured` where there is no figure yet.
    """
    run, rows = folder.load(), folder.rows()
    summary = summarise(run, rows, ttft_limit_s)
    if not summary.rows and not summary.mu:
        raise NotMeasured(f"{folder.path} holds no finished measurement; nothing to report")
    for name, content in contents(run, rows, summary).items():
        _write(folder.path / name, content)
    for fault in faults_of(run, summary):
        console.print(fault, style="yellow", highlight=False)
    for table in tables(run, summary):
        console.print(table.rich())
    console.print(f"report: {folder.path / 'report.html'}", highlight=False)
    return summary


def contents(run: Run, rows: list[Row], summary: Summary) -> Mapping[str, bytes]:
    """Every file of the report by its name: the same run, the same bytes."""
    shown = tables(run, summary)
    facts, faults = facts_of(run, rows, summary), faults_of(run, summary)
    drawn = pictures(run, summary)
    return {
        "summary.json": summary.model_dump_json(indent=1).encode() + b"\n",
        "table.md": _markdown(facts, faults, shown).encode(),
        "table.csv": as_csv(summary).encode(),
        "report.html": page(TITLE, facts, faults, shown, drawn).encode(),
        **drawn,
    }


def facts_of(run: Run, rows: list[Row], summary: Summary) -> list[str]:
    """What was run, on what, and how to read it."""
    settings, machine = run.settings, run.machine
    facts = [
        (
            f"Prompts of {settings.tokens} tokens, one output token, unique but for the chat template; {settings.requests} "
            f"requests per point, the first {settings.warm_up} by arrival discarded; Poisson arrivals drawn in advance, the "
            "same trace and prompts for every system."
        ),
        (
            "Time to first token runs from the scheduled arrival, so that it holds the client's queue too; failures stay in "
            "every denominator. u is the arrival rate over the native mu of the large model."
        ),
        f"Large: {_served(run.target)}. Small: {_served(run.source) if run.source else 'none'}.",
        (
            f"SGLang {machine.sglang} in first-come-first-served order, at most 32 prefills in a batch, no chunking of a "
            "batch, radix cache on; the large worker's cache is emptied before each point. For the lifts and the automatic "
            "choice the small worker has prefilled the prompts before; for the cascade it has not."
        ),
        (
            f"Machine: {machine.processor}, {machine.cores} cores, {machine.memory_gb:g} GB; kvlift {machine.kvlift}, "
            f"Python {machine.python}."
        ),
    ]
    if any(row.lift for row in rows):
        facts.append(
            "Lifted: share of all requests whose lift was applied; the others were prefilled natively, because the "
            "choice said so (automatic), the policy kept the small model's answer (cascade), or a lift failed."
        )
    if summary.rows:
        facts.append(
            "Points rest on one run of each seed. A p99 over a few hundred requests rests on the slowest handful: read "
            "it with its spread."
        )
    return facts


def faults_of(run: Run, summary: Summary) -> list[str]:
    """What the reader must know before believing a figure."""
    faults = []
    if summary.missing:
        faults.append(
            f"This run is not complete: {len(summary.missing)} of {len(run.planned)} points are missing "
            f"({'; '.join(summary.missing[:4])}{' ...' if len(summary.missing) > 4 else ''}). "
            "The same command goes on where it stopped."
        )
    if left_out := len(run.points) - len(run.finished()):
        faults.append(f"{left_out} points of other settings or an earlier mu are left out.")
    if late := [f"{row.system} at u = {row.u:g}" for row in summary.rows if not row.valid]:
        faults.append(f"Not valid, the generator could not hold the rate: {', '.join(late)}.")
    if failed := sum(row.errors for row in summary.rows):
        faults.append(f"{failed} requests failed; see the errors column.")
    return faults


def _served(worker: Served) -> str:
    return f"{worker.model} ({worker.model_digest[:12]}), threads: {worker.threads or 'unknown'}"


def _markdown(facts: list[str], faults: list[str], shown: list[Table]) -> str:
    parts = [f"## {TITLE}", "", *(f"> {fault}\n" for fault in faults)]
    parts += [table.markdown() for table in shown]
    parts += [f"- {fact}" for fact in facts]
    return "\n".join(parts) + "\n"


def _write(file: Path, content: bytes) -> None:
    try:
        file.write_bytes(content)
    except OSError as error:
        raise BadRun(f"{file}: {error.strerror}; name a folder that can be written") from error
