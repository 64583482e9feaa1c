"""One report over the packs of several structures that one pass over the corpus gave."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from sglang_ext.transfer.maps import SIDES, Structure
from sglang_ext.transfer.pack import Pack

_LABELS = {
    "parameters": "parameters",
    "bytes": "bytes",
    "r2_keys": "held-out R² of keys",
    "r2_values": "held-out R² of values",
    "attention_cosine": "attention cosine",
    "recovered": "recovered",
    "kl": "KL, nats per token",
}


@dataclass(frozen=True)
class StructureRow:
    """One structure; the field names are the keys of `comparison.json`.

    parameters: weights and biases of all maps; bytes: all tensors of the pack; R^2: held out, the mean over layers;
    attention_cosine: the mean over layers; recovered and kl (nats per token): of the lifted arm.
    """

    structure: Structure
    parameters: int
    bytes: int
    r2_keys: float
    r2_values: float
    attention_cosine: float | None
    recovered: float | None
    kl: float | None

    @classmethod
    def of(cls, pack: Pack) -> StructureRow:
        maps = [one for sides in pack.maps.layers for one in sides.values()]
        r2 = {side: fmean(sides[side].r2_held_out for sides in pack.manifest.layers) for side in SIDES}
        record = pack.manifest.acceptance
        return cls(
            structure=pack.maps.structure,
            parameters=sum(one.weight.numel() + one.bias.numel() for one in maps),
            bytes=sum(t.nbytes for one in maps for t in (one.weight, one.bias, one.input_mean, one.basis)),
            r2_keys=round(r2["key"], 4), r2_values=round(r2["value"], 4),
            attention_cosine=round(fmean(record.attention_cosine), 4) if record else None,
            recovered=round(record.recovered, 4) if record else None,
            kl=record.lifted.kl if record else None,
        )  # fmt: skip


def compare(packs: Sequence[Pack], out: Path, console: Console) -> None:
    """Prints one row per pack; writes `comparison.json` and `comparison.png` into `out`."""
    rows = [StructureRow.of(pack) for pack in packs]
    one = packs[0].manifest
    title = f"{one.source.name} -> {one.target.name}, {one.tokens} tokens, k = {one.k}, r = {one.rank}"
    table = Table("", *(row.structure for row in rows), title=title)
    for name, label in _LABELS.items():
        table.add_row(label, *("-" if (cell := getattr(row, name)) is None else f"{cell:,}" for row in rows))
    console.print(table)
    about = {"source": one.source.name, "target": one.target.name, "corpus": one.corpus, "tokens": one.tokens,
             "k": one.k, "rank": one.rank}  # fmt: skip
    (out / "comparison.json").write_text(json.dumps({**about, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    _plot(packs, title, out / "comparison.png")


def _plot(packs: Sequence[Pack], title: str, path: Path) -> None:
    """Held-out R^2 of both sides and the attention cosine, per target layer."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    fit, cosine = figure.subplots(1, 2)
    for number, pack in enumerate(packs):
        layers, structure = range(len(pack.manifest.layers)), pack.maps.structure
        for side, style in zip(SIDES, ("-", "--")):
            found = [sides[side].r2_held_out for sides in pack.manifest.layers]
            fit.plot(layers, found, style, marker="o", markersize=4, color=f"C{number}", label=f"{structure}, {side}s")
        if pack.manifest.acceptance:
            found = pack.manifest.acceptance.attention_cosine
            cosine.plot(layers, found, marker="o", markersize=4, color=f"C{number}", label=structure)
    for axes, what in ((fit, "held-out R²"), (cosine, "cosine, lifted and native attention output")):
        axes.set_xlabel("target layer")
        axes.set_ylabel(what)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
