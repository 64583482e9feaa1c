"""The table that a person reads on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sglang_ext.offline.evaluate.rows import Document
from sglang_ext.offline.figures import p_value, plain, share

_WIDTH = 110


def show(found: Document, console: Console) -> None:
    """Prints the models alone, then a table per pack, widened to its columns; a reverse direction after them."""
    console.width = max(console.width, _WIDTH)
    alone = Table(title=f"{found.dataset}, n = {found.target.n}")
    for name in ("alone", "", found.metric):
        alone.add_column(name, no_wrap=True)
    for role, one in (("target", found.target), *(("source", one) for one in found.sources.values())):
        alone.add_row(role, one.name, f"{one.accuracy:.1%}")
    console.print(alone)
    for pack in dict.fromkeys(row.pack for row in found.rows):
        console.print(_of_pack(found, pack))
    if found.reverse is not None:
        show(found.reverse, console)


def _of_pack(found: Document, pack: str) -> Table:
    fidelity = found.metric == "agreement"
    table = Table(title=f"{pack}, to {found.target.name}")
    table.add_column("selector", no_wrap=True)
    tests = ["KL, nats per token"] if fidelity else ["p target", "p random"]
    for name in ("rho", found.metric, "kept", "gap closed", *tests, "template"):
        table.add_column(name, justify="right")
    for row in (row for row in found.rows if row.pack == pack):
        tests = [plain(row.kl, 4)] if fidelity else [p_value(row.p_vs_target), p_value(row.p_vs_random)]
        table.add_row(
            row.selector.replace("_", " ") if row.coverage is None else f"coverage {row.coverage:g}", f"{row.rho:.2f}",
            f"{row.accuracy:.1%}", share(row.retention), share(row.gap_closed), *tests, share(row.template_share),
        )  # fmt: skip
    return table
