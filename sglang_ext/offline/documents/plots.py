"""The plots of an evaluation of documents, each named after what it shows; the paper's figures are named beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_ext.documents.planners import FULL, NO_RECOMPUTE
from sglang_ext.offline.documents.libraries import MAPPED, NO_CACHE
from sglang_ext.offline.documents.rows import AttentionRow, Report, Row
from sglang_ext.offline.documents.timing import TimingRow
from sglang_ext.offline.evaluate.style import COLOURS, GREY, MARKERS, canvas, save, spread, tidy

# Learned methods first, then the rules: a method has one colour and marker in all plots.
_STYLED = ("sempic", "packet", "joint", "epic", "random", "cache_blend", "a3")
_REFERENCES = {FULL: ("full", "*"), NO_RECOMPUTE: ("no recompute", "o"), NO_CACHE: ("no documents", "x")}
_SHOWN = (FULL, NO_RECOMPUTE, *_STYLED[:3], NO_CACHE)
_METRICS: dict[str, tuple[str, Callable[[Row], float]]] = {
    "exact": ("exact match (%)", lambda row: 100 * row.exact_match),
    "micro_f1": ("corpus micro-F1", lambda row: row.micro_f1),
}
ABREAST = 3  # tasks in one figure
LOG_FROM = 20  # a peak so high takes a logarithmic axis
_COSTS: tuple[tuple[str, Callable[[Row], float]], ...] = (
    ("online prefill (MFLOP)", lambda row: row.flops / 1e6),
    ("time to first token (ms)", lambda row: row.ttft_ms),
)


def draw(found: Report, out: Path) -> list[Path]:
    """Writes the plots that the report has data for into a folder; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    swept = [task for task in _tasks(found.rows) if any(_is_swept(row, task) for row in found.rows)]
    for name, (label, of) in _METRICS.items():
        for at in range(0, len(swept), ABREAST):
            more = f"_{at // ABREAST + 1}" if at else ""
            shown = [_rows(found, task) for task in swept[at : at + ABREAST]]
            figures[f"efficiency_{name}{more}"] = _efficiency(shown, label, of)
        figures[f"methods_{name}"] = _methods(found, label, of)
    if any(row.method.startswith(MAPPED) for row in found.rows):
        figures["mapped"] = _mapped(found.rows)
    if len(found.timing) > 1:
        figures["time"] = _time(found.timing)
    compared = [row for row in found.attention if row.method != NO_RECOMPUTE and row.r_int is not None]
    if compared:
        figures["attention"] = _regions(compared)
    if any(len(row.peaks) > 1 for row in found.attention):
        figures["peaks"] = _peaks(found.attention)
    return [save(figure, out / f"{name}.png") for name, figure in figures.items()]


Task = tuple[str, str]  # task, model


def _tasks(rows: Sequence[Row]) -> list[Task]:
    return list(dict.fromkeys((row.task, row.model) for row in rows))


def _rows(found: Report, task: Task) -> list[Row]:
    return [row for row in found.rows if (row.task, row.model) == task]


def _is_swept(row: Row, task: Task) -> bool:
    return (row.task, row.model) == task and row.budget is not None and not row.method.startswith(MAPPED)


def _efficiency(tasks: Sequence[Sequence[Row]], label: str, of: Callable[[Row], float]) -> Figure:
    """Figure 4: quality against operations and time; sweeps as lines, methods without a budget as marks."""
    figure = Figure(figsize=(max(7.2, 0.6 + 5.2 * len(tasks)), 7.4), layout="constrained")
    grid = figure.subplots(2, len(tasks), squeeze=False)
    for column, rows in enumerate(tasks):
        for axes, (cost, at) in zip(grid[:, column], _COSTS):
            for method in dict.fromkeys(row.method for row in rows if not row.method.startswith(MAPPED)):
                _trace(axes, [row for row in rows if row.method == method], at, of)
            axes.set_xlabel(cost)
            axes.set_ylabel(label)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=min(0, axes.get_ylim()[0]))
            tidy(axes, f"{rows[0].task}, n = {rows[0].n}", grid="both")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=5 * len(tasks), frameon=False, fontsize=8)
    return figure


def _trace(axes: Axes, rows: Sequence[Row], at: Callable[[Row], float], of: Callable[[Row], float]) -> None:
    """One method: a line through its budgets, or a mark."""
    method = rows[0].method
    places = [(at(row), of(row)) for row in sorted(rows, key=_budget)]
    if method in _REFERENCES:
        name, marker = _REFERENCES[method]
        axes.plot(*zip(*places), marker, color="black", ms=9 if marker == "*" else 7, label=name, zorder=4)
        return
    style = _STYLED.index(method)
    swept = rows[0].budget is not None
    axes.plot(
        *zip(*places), ls="-" if swept else "none", marker=MARKERS[style], color=COLOURS[style], ms=5 if swept else 9,
        lw=1.5, label=_named(method), zorder=3,
    )  # fmt: skip


def _methods(found: Report, label: str, of: Callable[[Row], float]) -> Figure:
    """Table 1: methods without a budget, by task."""
    tasks = _tasks(found.rows)
    figure, axes = canvas(width=max(7.2, 1.3 * len(tasks) + 1.5))
    shown = [method for method in _SHOWN if any(row.method == method for row in found.rows)]
    width = 0.84 / len(shown)
    for place, method in enumerate(shown):
        heights = {at: of(row) for at, task in enumerate(tasks) for row in _rows(found, task) if row.method == method}
        left = [at - 0.42 + (place + 0.5) * width for at in heights]
        axes.bar(left, list(heights.values()), width * 0.92, color=_colour(method), label=_named(method))
    axes.set_xticks(range(len(tasks)), [task for task, _ in tasks])
    axes.set_ylabel(label)
    tidy(axes, "documents: methods by task", grid="y")
    figure.legend(loc="outside lower center", ncols=len(shown), frameon=False, fontsize=8.5)
    return figure


def _mapped(rows: Sequence[Row]) -> Figure:
    """Documents of a smaller model, mapped, against the share of them that is recomputed."""
    figure, axes = canvas(width=9, height=4.6)
    labels = []
    mapped = [row for row in rows if row.method.startswith(MAPPED)]
    lines = list(dict.fromkeys((row.task, row.model, row.documents) for row in mapped))
    for colour, (task, model, pack) in zip(COLOURS, lines):
        own = [row for row in mapped if (row.task, row.model, row.documents) == (task, model, pack)]
        plain = [row for row in own if row.budget == 0]
        for method, line in ((MAPPED, "-"), (f"{MAPPED}_random", ":")):
            ordered = sorted([row for row in own if row.method == method] + (plain if line == ":" else []), key=_budget)
            values = [100 * row.exact_match for row in ordered]
            axes.plot([_budget(row) for row in ordered], values, line, marker="o", ms=4, color=colour, lw=1.8)
            labels.append((values[-1], f"{task}{', random' if line == ':' else ''}, {pack}", colour))
        full = next(row for row in rows if (row.task, row.model, row.method) == (task, model, FULL))
        axes.axhline(100 * full.exact_match, color=colour, lw=1, ls="--")
    axes.set_xlabel("share of the documents' tokens recomputed")
    axes.set_ylabel("exact match (%)")
    axes.set_ylim(-3, 103)
    tidy(axes, "documents of the source model, mapped; dashed: full prefill", grid="y")
    spread(axes, labels)
    return figure


def _time(rows: Sequence[TimingRow]) -> Figure:
    """Time to the first token against the documents' length."""
    figure, axes = canvas()
    tokens, first = [row.tokens for row in rows], rows[0]
    for name, values, colour in (
        ("full prefill", [row.full_ms / 1e3 for row in rows], GREY),
        ("linked", [row.linked_ms / 1e3 for row in rows], COLOURS[0]),
    ):
        axes.plot(tokens, values, marker="o", ms=5, lw=1.8, color=colour, label=name)
        for at, value in zip(tokens, values):
            axes.annotate(f"{value:.2g}", (at, value), (0, 6), textcoords="offset points", ha="center", fontsize=8)
    axes.set_xlabel("tokens of each document")
    axes.set_ylabel("time to first token (s)")
    axes.set_xticks(tokens)
    axes.set_ylim(bottom=0)
    tidy(axes, f"{first.documents} documents and {first.inline} inline tokens, shape {first.shape}", grid="y")
    axes.legend(frameon=False, fontsize=8.5)
    return figure


def _budget(row: Row) -> float:
    return row.budget or 0.0


def _regions(rows: Sequence[AttentionRow]) -> Figure:
    """Figures 3 and 5: from R_pre to R_int of each method; 1 is no recompute, 0 the full prefill."""
    figure, axes = canvas(height=0.9 + 0.26 * len(rows))
    ordered = sorted(rows, key=lambda row: (row.task, row.method, row.documents), reverse=True)
    for at, row in enumerate(ordered):
        colour = _colour(row.method)
        if row.r_pre is not None:
            axes.annotate("", (row.r_int, at), (row.r_pre, at), arrowprops={"arrowstyle": "->", "color": colour})
            axes.plot(row.r_pre, at, "o", color=colour, ms=5, mfc="white", zorder=3)
        axes.plot(row.r_int, at, "o", color=colour, ms=5, zorder=3)
    axes.axvline(1, color=GREY, ls="--", lw=1)
    axes.set_yticks(range(len(ordered)), [f"{row.task}, {row.documents}" for row in ordered], fontsize=8)
    axes.set_ylim(-0.7, len(ordered) - 0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel("attention error over that of no recompute: open, first tenth; filled, interior")
    tidy(axes, f"attention to documents, n = {ordered[0].n}", grid="x")
    return figure


def _peaks(rows: Sequence[AttentionRow]) -> Figure:
    """Figure 6: the density of attention at a document's first tokens over its interior's."""
    figure, axes = canvas()
    methods = list(dict.fromkeys(row.method for row in rows if row.peaks))
    for method in methods:
        own = [row.peaks for row in rows if row.method == method and row.peaks]
        most = max(map(len, own))
        means = [_geometric([peaks[j] for peaks in own if len(peaks) > j]) for j in range(most)]
        axes.plot(range(1, most + 1), means, marker="o", ms=5, lw=1.8, color=_colour(method), label=_named(method))
    if max(max(row.peaks) for row in rows if row.peaks) > LOG_FROM:
        axes.set_yscale("log")
    axes.axhline(1, color=GREY, ls="--", lw=1)
    axes.set_xticks(range(1, 1 + max(len(row.peaks) for row in rows)))
    axes.set_xlabel("token of the document")
    axes.set_ylabel("attention density over the interior's")
    tidy(axes, "where in a document the query looks (geometric mean over tasks)", grid="y")
    axes.legend(edgecolor="none", framealpha=1, fontsize=8.5)
    return figure


def _geometric(values: Sequence[float]) -> float:
    product = 1.0
    for value in values:
        product *= value
    return product ** (1 / len(values))


def _colour(method: str) -> str:
    if method in _STYLED:
        return COLOURS[_STYLED.index(method)]
    return {FULL: GREY, NO_RECOMPUTE: "#b9c2cc", NO_CACHE: "#dddddd"}.get(method, GREY)


def _named(method: str) -> str:
    known = {"sempic": "SemPIC", "packet": "KV Packet", "joint": "Joint", "cache_blend": "CacheBlend", "a3": "A³"}
    return known.get(method) or _REFERENCES.get(method, (method.upper() if method == "epic" else method, ""))[0]
