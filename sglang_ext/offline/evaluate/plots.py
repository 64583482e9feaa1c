"""The plots of an evaluation, each named after what it shows; the paper's figures are named beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_ext.offline.evaluate.rows import Document, LayerRow, Row
from sglang_ext.offline.evaluate.strip import Strip
from sglang_ext.offline.evaluate.strip_plot import draw_strip
from sglang_ext.offline.evaluate.style import COLOURS, GREY, MARKERS, canvas, save, spread, tidy
from sglang_ext.transfer.selectors import RANDOM, RANK_DISAGREEMENT


def draw(found: Document, strip: Strip | None, rho: float, out: Path) -> list[Path]:
    """Writes the plots that the document has data for into a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    first = [row for row in found.rows if row.pack == found.rows[0].pack and row.coverage is None]
    at_rho = [row for row in first if row.rho == rho]
    figures: dict[str, Figure] = {"accuracy": _accuracy(found)}
    if len(at_rho) > 1:
        figures["selectors"] = _selectors(found, at_rho, rho)
        figures["budgets"] = _budgets(found, first)
    if found.reverse is not None:
        figures["reverse"] = _reverse(found.reverse)
    if found.layers:
        figures["layers"] = _layers(found.layers[0])
    if strip is not None:
        figures["strip"] = draw_strip(strip)
    return [save(figure, out / f"{name}.png") for name, figure in figures.items()]


def _accuracy(found: Document) -> Figure:
    """Figure 6: against rho, one line per pack, with each source and the target alone."""
    figure, axes = canvas()
    labels = [_alone_line(axes, found.target.accuracy, f"{found.target.name} alone", GREY, "-")]
    packs = list(dict.fromkeys(row.pack for row in found.rows))
    colour_of: dict[str, str] = {}
    for colour, pack in zip(COLOURS, packs):
        line = [r for r in found.rows if r.pack == pack and r.selector == RANK_DISAGREEMENT and r.coverage is None]
        labels.append(_line(axes, line, pack, colour))
        colour_of.setdefault(line[0].source, colour)
    for source, one in found.sources.items():
        labels.append(_alone_line(axes, one.accuracy, f"{one.name} alone", colour_of[source], "--"))
    covered = [row for row in found.rows if row.coverage is not None and row.pack == packs[0]]
    axes.plot(
        [r.rho for r in covered],
        [100 * r.accuracy for r in covered],
        "D",
        mfc="white",
        color=COLOURS[0],
        ms=6,
        zorder=5,
    )
    for row in covered:
        axes.annotate(
            f"coverage {row.coverage:g}", (row.rho, 100 * row.accuracy), (6, -14), textcoords="offset points",
            fontsize=7.5, color=COLOURS[0], zorder=4, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip
    _axes(axes, found, f"{found.dataset}, n = {found.target.n}: rank disagreement")
    spread(axes, labels)
    return figure


def _selectors(found: Document, rows: Sequence[Row], rho: float) -> Figure:
    """Figures 4 and 7: selectors at one budget, and what is left to the target."""
    figure, axes = canvas(height=0.9 + 0.42 * len(rows))
    ranked = sorted(rows, key=lambda row: row.accuracy)
    target = 100 * found.target.accuracy
    for at, row in enumerate(ranked):
        value, ours = 100 * row.accuracy, row.selector == RANK_DISAGREEMENT
        axes.barh(at, value, color=COLOURS[0] if ours else "#b9c2cc", height=0.66)
        gap = target - value
        if gap > 0.05:
            axes.plot([value, target], [at, at], color=GREY, lw=1, ls=":")
        text = f"{value:.1f}" + (f"  (−{gap:.1f})" if gap > 0.05 else "  (no gap)")
        inside = value > 60
        axes.text(
            value - 1 if inside else value + 1, at, text, va="center", ha="right" if inside else "left", fontsize=8.5,
            color="white" if inside and ours else "black",
            bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": 1},
        )  # fmt: skip
    axes.axvline(target, color=GREY, lw=1.4)
    axes.text(
        target, len(ranked) - 0.42, f"{found.target.name} alone {target:.1f}", ha="right", fontsize=8.5, color=GREY
    )
    axes.set_yticks(range(len(ranked)), [_named(row.selector) for row in ranked])
    axes.set_xlim(0, 1.02 * max(1, target, *(100 * row.accuracy for row in ranked)))
    axes.set_ylim(-0.6, len(ranked) - 0.05)
    axes.set_xlabel(f"{found.metric} (%)")
    tidy(axes, f"{found.rows[0].pack}: {rho:.0%} of the positions recomputed (gap to the target)", grid="x")
    return figure


def _budgets(found: Document, rows: Sequence[Row]) -> Figure:
    """Figure 8: each selector against rho; all start from the same rho = 0."""
    figure, axes = canvas()
    plain = next(row for row in rows if row.rho == 0)
    labels = [_alone_line(axes, found.target.accuracy, f"{found.target.name} alone", GREY, "-")]
    for colour, selector in zip(COLOURS, dict.fromkeys(row.selector for row in rows)):
        own = [row for row in rows if row.selector == selector and row.rho > 0]
        labels.append(_line(axes, [plain, *own], _named(selector), colour))
    _axes(axes, found, f"{found.rows[0].pack}: selectors at equal budgets")
    spread(axes, labels)
    return figure


def _reverse(found: Document) -> Figure:
    """Table 2: the small model alone, and decoding from the large model's mapped cache."""
    figure, axes = canvas()
    bars = [(f"{found.target.name}\nalone", found.target.accuracy, GREY)]
    bars += [(f"rho = {row.rho:g}", row.accuracy, COLOURS[0]) for row in found.rows]
    for at, (_, value, colour) in enumerate(bars):
        axes.bar(at, 100 * value, color=colour, width=0.66)
        axes.text(at, 100 * value + 1, f"{100 * value:.1f}", ha="center", fontsize=8.5)
    axes.set_xticks(range(len(bars)), [name for name, *_ in bars], fontsize=8.5)
    axes.set_ylim(0, 100)
    axes.set_ylabel(f"{found.metric} (%)")
    tidy(axes, f"{found.rows[0].source} → {found.target.name}, n = {found.target.n}", grid="y")
    return figure


def _layers(row: LayerRow) -> Figure:
    """Figure 12: how much of the shared set each layer would have chosen by itself."""
    figure, axes = canvas()
    labels = []
    for colour, name in zip((COLOURS[0], COLOURS[1]), ("rank_disagreement", "mapping_error")):
        values = getattr(row, name)
        axes.plot(range(len(values)), values, "o-", color=colour, ms=5, lw=1.8)
        labels.append((values[-1], _named(name), colour))
    axes.set_xticks(range(len(row.rank_disagreement)))
    axes.set_xlabel("target layer")
    axes.set_ylabel("overlap with the shared set")
    axes.set_ylim(top=1.0)
    spread(axes, labels)
    tidy(axes, f"{row.pack}: each layer's own top {row.rho:.0%} and the shared one", grid="y")
    return figure


Label = tuple[float, str, str]  # height, text, colour


def _line(axes: Axes, rows: Sequence[Row], name: str, colour: str) -> Label:
    ordered = sorted(rows, key=lambda row: row.rho)
    values = [100 * row.accuracy for row in ordered]
    marker = MARKERS[COLOURS.index(colour)]
    axes.plot([row.rho for row in ordered], values, marker=marker, color=colour, ms=5, lw=1.8)
    return values[-1], name, colour


def _alone_line(axes: Axes, value: float, name: str, colour: str, style: str) -> Label:
    axes.axhline(100 * value, color=colour, ls=style, lw=1.4)
    return 100 * value, name, colour


def _axes(axes: Axes, found: Document, title: str) -> None:
    axes.set_xlabel("rho, share of the prompt's positions recomputed")
    axes.set_ylabel(f"{found.metric} (%)")
    axes.set_ylim(-3, 103)
    tidy(axes, title, grid="y")


def _named(selector: str) -> str:
    oracle = selector not in (RANK_DISAGREEMENT, RANDOM, "source_attention", "layer_prefix")
    return selector.replace("_", " ") + (" (oracle)" if oracle else "")
