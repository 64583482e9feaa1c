"""The report's tables, once, for Markdown, HTML, CSV and the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from rich.table import Table as RichTable

from loadtest.lineup import PAPER_LIFT
from loadtest.predict import predict, service_of
from loadtest.run import LARGE, Run
from loadtest.summary import Summary, SystemRow

_NONE = "–"
_FAILED = "failed"
_SERVICE = (1, 8, 32)
_FLEETS = 16
_FLEET_LOADS = (0.5, 1.0, 1.5, 2.0, 4.0)


@dataclass(frozen=True)
class Table:
    """Cells as they are shown. `note`: how to read it; `brief`: the columns that a terminal has room for."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    brief: Sequence[str]

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", self.note, ""]
        lines += [_line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows)]
        return "\n".join(lines) + "\n"

    def html(self) -> str:
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return (
            f"<h2>{escape(self.title)}</h2>\n<p>{escape(self.note)}</p>\n"
            f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}\n</table></div>\n'
        )

    def rich(self) -> RichTable:
        table = RichTable(title=self.title)
        for column in self.brief:
            table.add_column(column, justify="right", no_wrap=True)
        shown = [self.columns.index(column) for column in self.brief]
        for row in self.rows:
            table.add_row(*(row[number] for number in shown))
        return table


def tables(run: Run, summary: Summary) -> list[Table]:
    """Those for which there are figures, in the order of a report."""
    made = [table4(summary), all_systems(summary), saturation(summary), fleets(run, summary)]
    return [table for table in made if table.rows]


def table4(summary: Summary) -> Table:
    """The large model and the lift side by side, as the paper's table 4."""
    by_key = {(row.system, row.u): row for row in summary.rows}
    pairs = [(row, by_key.get((PAPER_LIFT, row.u))) for row in summary.rows if row.system == LARGE]
    return Table(
        "Native prefill and lift (rho = 0.3), as the paper's table 4",
        "Time to first token in ms; × is native over lift, above 1 the lift is faster. Batch: requests per batch.",
        ("u", "rate/s", "native p50", "native p99", "native batch", "lift p50", "lift p99", "lift batch", "× p50", "× p99"),
        [
            (
                f"{native.u:g}", f"{native.rate:.2f}",
                _ms(native.ttft_median_ms), _ms(native.ttft_p99_ms), _number(native.mean_batch),
                _ms(lift.ttft_median_ms), _ms(lift.ttft_p99_ms), _number(lift.mean_batch),
                _times(lift.speedup_median), _times(lift.speedup_p99),
            )
            for native, lift in pairs
            if lift is not None
        ],
        ("u", "native p50", "native p99", "lift p50", "lift p99", "× p50", "× p99"),
    )  # fmt: skip


def all_systems(summary: Summary) -> Table:
    limit = f"{summary.ttft_limit_ms / 1000:g} s"
    return Table(
        "Time to first token under Poisson load",
        "Milliseconds, all seeds together, the smallest and largest seed in brackets; × is the large model's native "
        f"figure over this one. Goodput: share of all requests whose first token came within {limit}. Lag: how late "
        "requests were sent, p99; where it is above 5 % of the median, the row is not valid.",
        (
            "system", "u", "rate/s", "p50", "p90", "p99", "× p50", "× p99", "batch", "escalated", "lifted", "errors",
            "goodput", "lag", "seeds", "valid",
        ),
        [
            (
                row.system, f"{row.u:g}", f"{row.rate:.2f}",
                _with_spread(row.ttft_median_ms, row.ttft_median_spread_ms, row.seeds),
                _with_spread(row.ttft_p90_ms, row.ttft_p90_spread_ms, row.seeds),
                _with_spread(row.ttft_p99_ms, row.ttft_p99_spread_ms, row.seeds),
                _times(row.speedup_median), _times(row.speedup_p99), _number(row.mean_batch),
                _share(row.escalated), _share(row.applied), f"{row.errors} of {row.requests}", _share(row.goodput),
                _number(row.lag_p99_ms), str(row.seeds), "yes" if row.valid else "NO",
            )
            for row in summary.rows
        ],
        ("system", "u", "p50", "p99", "× p50", "× p99"),
    )  # fmt: skip


def saturation(summary: Summary) -> Table:
    return Table(
        "Saturation throughput mu, requests per second",
        "Equation 10: three maximum batches of 32 back to back, 96 requests sent at once; the cascade as a bracket "
        "between the largest rate whose queue did not grow and the smallest whose queue did. S(b): milliseconds that "
        "a batch of b takes.",
        ("tokens", "system", "mu", "lowest–highest", "× native", "batch", *(f"S({batch})" for batch in _SERVICE)),
        [
            (
                str(tokens), system, f"{mu.median:.2f}", f"{mu.lowest:.2f}–{mu.highest:.2f}", _times(mu.ratio),
                _number(mu.mean_batch), *(_ms(mu.service_ms.get(batch)) for batch in _SERVICE),
            )
            for tokens, systems in summary.mu.items()
            for system, mu in systems.items()
        ],
        ("tokens", "system", "mu", "lowest–highest", "× native", "batch"),
    )  # fmt: skip


def fleets(run: Run, summary: Summary) -> Table:
    """By simulation: how many workers hold a rate."""
    services = {name: service for name in _systems(summary) if (service := service_of(run, name)) is not None}
    limit_s = summary.ttft_limit_ms / 1000

    def needed(name: str, load: float) -> str:
        for servers in range(1, _FLEETS + 1):
            if predict(run, services[name], load * run.mu_target, (0, 1, 2), servers).p99_s <= limit_s:
                return str(servers)
        return f"> {_FLEETS}"

    return Table(
        "Simulated: workers needed",
        f"How many workers, the next request always to the one with the fewest, keep the p99 within {limit_s:g} s, by "
        "the simulator with the measured S(b); rate as a multiple of one native worker's mu.",
        ("rate / mu", *services),
        [(f"{load:g}", *(needed(name, load) for name in services)) for load in _FLEET_LOADS] if services else [],
        ("rate / mu", *services),
    )


def as_csv(summary: Summary) -> str:
    """One line per system and load, all its plain figures."""
    names = [name for name in SystemRow.model_fields if name != "phases_ms"]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    for row in summary.rows:
        values = [getattr(row, name) for name in names]
        writer.writerow([_plain(value) for value in values])
    return out.getvalue()


def _systems(summary: Summary) -> list[str]:
    return list(dict.fromkeys(name for systems in summary.mu.values() for name in systems))


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join("" if one is None else f"{one:.3f}" for one in value)
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else value


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _ms(value: float | None) -> str:
    return _NONE if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _with_spread(value: float | None, spread: tuple[float | None, float | None], seeds: int) -> str:
    if value is None:
        return _FAILED
    return _ms(value) if seeds == 1 else f"{_ms(value)} ({_ms(spread[0])}–{_ms(spread[1])})"


def _number(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1f}"


def _times(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.1%}"
