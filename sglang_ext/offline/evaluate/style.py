"""How the plots look: size for a README, colours that colour-blind readers can tell apart, labels at the lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, darkest contrast first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "v", "D", "P", "X")
GREY = "#4d4d4d"
_DPI = 150
_GAP = 0.055  # between two labels, as a share of the axis


def canvas(width: float = 7.2, height: float = 3.8) -> tuple[Figure, Axes]:
    """A figure of inches, without pyplot and its global state."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def tidy(axes: Axes, title: str, grid: str) -> None:
    """Title at the left, faint grid lines along one axis, no frame at the top and right."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis=grid, color="#e3e3e3", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def spread(axes: Axes, labels: Sequence[tuple[float, str, str]]) -> None:
    """Writes (height, text, colour) labels right of the axes, moved apart where they would overlap."""
    low, high = axes.get_ylim()
    step = _GAP * (high - low)
    ordered = sorted(labels)
    heights: list[float] = []
    for y, *_ in ordered:
        heights.append(max(y, heights[-1] + step) if heights else y)
    ceiling = high
    for at in reversed(range(len(heights))):  # what was pushed out at the top comes down again
        heights[at] = min(heights[at], ceiling)
        ceiling = heights[at] - step
    for height, (_, text, colour) in zip(heights, ordered):
        axes.annotate(
            text, (1.0, height), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center", fontsize=8.5, color=colour, annotation_clip=False,
        )  # fmt: skip


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=_DPI, facecolor="white")
    return path
