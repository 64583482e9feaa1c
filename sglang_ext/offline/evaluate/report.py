"""The table that a person reads on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sglang_ext.offline.evaluate.rows import Document


def show(found: Document, console: Console) -> None:
    """Prints the models alone, then a table per pack; a reverse direction after them."""
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
        tests = [_plain(row.kl)] if fidelity else [_p(row.p_vs_target), _p(row.p_vs_random)]
        table.add_row(
            row.selector.replace("_", " ") if row.coverage is None else f"coverage {row.coverage:g}", f"{row.rho:.2f}",
            f"{row.accuracy:.1%}", _share(row.retention), _share(row.gap_closed), *tests, _share(row.template_share),
        )  # fmt: skip
    return table


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _p(value: float | None) -> str:
    return "-" if value is None else "<.001" if value < 0.001 else f"{value:.3f}"
