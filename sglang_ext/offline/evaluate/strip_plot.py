"""The token strip (figures 3 and 13): tokens as columns, what each selector takes, and its scores."""

from __future__ import annotations

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from sglang_ext.offline.evaluate.strip import Strip
from sglang_ext.offline.evaluate.style import COLOURS, GREY, canvas
from sglang_ext.transfer.selectors import RANDOM, RANK_DISAGREEMENT

TEMPLATE_SHOWN = 10  # tokens of the template before the content; the rest of the prefix is left out
MOST_COLUMNS = 44  # in one line; longer strips go on below
_CLIP = 0.95  # each row of scores is scaled to this quantile


def draw_strip(strip: Strip) -> Figure:
    """Content and the template around it; each row of scores scaled to its own 95th percentile."""
    start = max(0, int(torch.nonzero(~strip.template)[0]) - TEMPLATE_SHOWN)
    shown = range(start, len(strip.tokens))
    lines = [shown[at : at + MOST_COLUMNS] for at in range(0, len(shown), MOST_COLUMNS)]
    names = list(strip.chosen)
    scored = [name for name in names if name != RANDOM]
    rows = len(names) + len(scored)
    figure, first = canvas(10.5, 0.9 + len(lines) * (0.85 + 0.19 * rows))
    first.remove()
    for number, line in enumerate(lines):
        axes = figure.add_subplot(len(lines), 1, number + 1)
        _line(axes, strip, line, names, scored)
    figure.suptitle(
        f"{strip.pack}: positions {start} to {len(strip.tokens) - 1} of one prompt. "
        f"Above: chosen at rho = {strip.rho:g}. Below: scores. Grey tokens are template, blue ones recomputed.",
        x=0.01, ha="left", fontsize=9.5,
    )  # fmt: skip
    return figure


def _line(axes: Axes, strip: Strip, line: range, names: list[str], scored: list[str]) -> None:
    rows = len(names) + len(scored)
    for at, name in enumerate(names):
        chosen = set(strip.chosen[name].tolist())
        for column, position in enumerate(line):
            filled = COLOURS[0] if name == RANK_DISAGREEMENT else "#6f7a86"
            axes.add_patch(_cell(column, rows - 1 - at, filled if position in chosen else "#f2f2f2"))
    for at, name in enumerate(scored):
        scores = strip.scores[name]
        top = float(torch.quantile(scores, _CLIP)) or 1.0
        for column, position in enumerate(line):
            shade = 1 - min(1.0, float(scores[position]) / top)
            axes.add_patch(_cell(column, len(scored) - 1 - at - 0.35, (1, 0.35 + 0.65 * shade, 0.15 + 0.85 * shade)))
    taken = set(strip.chosen[RANK_DISAGREEMENT].tolist())
    for column, position in enumerate(line):
        colour = COLOURS[0] if position in taken else "#9a9a9a" if strip.template[position] else "black"
        token = strip.tokens[position].strip() or "␣"
        axes.text(column + 0.5, rows + 0.25, token, rotation=90, ha="center", va="bottom", fontsize=7, color=colour)
    axes.set_xlim(0, MOST_COLUMNS)
    axes.set_ylim(-0.4, rows + 3.2)
    marks = [rows - 0.5 - at for at in range(len(names))] + [len(scored) - 0.85 - at for at in range(len(scored))]
    axes.set_yticks(marks, [name.replace("_", " ") for name in (*names, *scored)], fontsize=7, color=GREY)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell(column: int, row: float, colour: object) -> Rectangle:
    return Rectangle((column, row), 0.92, 0.86, facecolor=colour, edgecolor="none")
