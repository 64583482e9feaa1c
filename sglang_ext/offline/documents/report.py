"""The tables that a person reads on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sglang_ext.documents.compilers import Method
from sglang_ext.offline.documents.rows import Report, Row
from sglang_ext.offline.figures import p_value, plain, share

_WIDTH = 120
LEARNED = tuple(one.value for one in Method if one is not Method.PLAIN)


def show(found: Report, console: Console) -> None:
    """Prints a table per task, then attention where it was compared, widened to what the columns need."""
    console.width = max(console.width, _WIDTH)
    for reason, count in found.dropped.items():
        console.print(f"{count} x {reason}")
    for task in dict.fromkeys((row.task, row.model) for row in found.rows):
        console.print(_of_task([row for row in found.rows if (row.task, row.model) == task]))
    domains = dict.fromkeys(row.documents for row in found.rows if row.method in LEARNED)
    if len(domains) > 1:
        console.print(_matrix(found, list(domains)))
    if found.timing:
        console.print(_timing(found))
    if found.attention:
        console.print(_attention(found))


def _of_task(rows: list[Row]) -> Table:
    table = Table(title=f"{rows[0].task} on {rows[0].model}, n = {rows[0].n}")
    table.add_column("method", no_wrap=True)
    for name in (
        "budget",
        "exact",
        "micro-F1",
        "KL",
        "recovery",
        "by exact",
        "p full",
        "computed",
        "ms",
        "MFLOP",
        "missed",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.method.replace("_", " "), "-" if row.budget is None else f"{row.budget:g}", f"{row.exact_match:.1%}",
            f"{row.micro_f1:.3f}", f"{row.kl:.4f}", share(row.recovery), share(row.recovery_exact), p_value(row.p_vs_full),
            f"{row.computed:.0%}", f"{row.ttft_ms:.1f}", f"{row.flops / 1e6:,.1f}", str(row.missed),
        )  # fmt: skip
    return table


def _matrix(found: Report, domains: list[str]) -> Table:
    """Table 2: what a Writer was trained on against what it is asked about."""
    tasks = list(dict.fromkeys(row.task for row in found.rows))
    table = Table(title="corpus micro-F1 by what was trained on")
    for name in ("trained on", "method"):
        table.add_column(name, no_wrap=True)
    for task in tasks:
        table.add_column(task, justify="right")
    for domain in domains:
        for method in LEARNED:
            own = {row.task: row for row in found.rows if (row.documents, row.method) == (domain, method)}
            if own:
                table.add_row(domain, method, *(f"{own[task].micro_f1:.2f}" if task in own else "-" for task in tasks))
    return table


def _timing(found: Report) -> Table:
    table = Table(title="time to first token, documents compiled before, milliseconds")
    table.add_column("shape", no_wrap=True)
    for name in ("documents", "inline", "full", "linked", "ratio", "by operations"):
        table.add_column(name, justify="right")
    for row in found.timing:
        table.add_row(
            row.shape, f"{row.documents} of {row.tokens}", str(row.inline), f"{row.full_ms:,.0f}", f"{row.linked_ms:,.0f}",
            f"{row.ratio:.1f}", f"{row.full_flops / row.linked_flops:.1f}",
        )  # fmt: skip
    return table


def _attention(found: Report) -> Table:
    table = Table(title="attention to documents against the full prefill's (equations 4 and 11)")
    for name in ("task", "method", "documents"):
        table.add_column(name, no_wrap=True)
    for name in ("n", "R pre", "R int", "T1", "T2", "T3"):
        table.add_column(name, justify="right")
    for row in found.attention:
        peaks = [f"{one:.2f}" for one in row.peaks[:3]]
        table.add_row(
            row.task, row.method.replace("_", " "), row.documents, str(row.n), plain(row.r_pre, 3), plain(row.r_int, 3),
            *peaks, *["-"] * (3 - len(peaks)),
        )  # fmt: skip
    return table
