"""`kvlift trace`: a file of spans, from many processes and in any order, becomes one tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from router.cli import build
from router.telemetry.trace_tree import TraceError, read, tree

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(name: str, own: int, parent: int | None, start: int, end: int, trace: str = TRACE, **more) -> str:
    """A line of the file. `start` and `end` are milliseconds."""
    line = {
        "name": name,
        "context": {"trace_id": f"0x{trace}", "span_id": f"0x{own:016x}", "trace_state": "[]"},
        "kind": "SpanKind.INTERNAL",
        "parent_id": None if parent is None else f"0x{parent:016x}",
        "start_time": f"2026-01-01T00:00:00.{start:03d}000Z",
        "end_time": f"2026-01-01T00:00:00.{end:03d}000Z",
        "status": {"status_code": "UNSET"},
        "attributes": {},
        "resource": {"attributes": {"service.name": "kvlift-router"}},
    }
    return json.dumps({**line, **more})


def printed(file: Path) -> list[str]:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(tree(*read(file).find(None)))
    return console.export_text().splitlines()


def write(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "t.jsonl"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_children_hang_below_their_parents_in_the_order_in_which_they_began(tmp_path):
    file = write(
        tmp_path,
        span("late", 3, 1, 50, 90),
        span("leaf", 4, 2, 12, 20),
        span("early", 2, 1, 10, 40),
        span("root", 1, 999, 0, 100),  # its parent is the client's, which is not in the file
    )
    lines = printed(file)
    assert [line.split("─ ")[-1].split("  ")[0] for line in lines[1:]] == ["root", "early", "leaf", "late"]
    assert [line.index("─ ") for line in lines[1:]] == [2, 6, 10, 6]
    assert "100.0 ms" in lines[1] and "+50.0" in lines[4]


def test_many_spans_of_one_name_share_a_line(tmp_path):
    steps = [span("decode", 10 + n, 1, 10 + n, 11 + n) for n in range(20)]
    lines = printed(write(tmp_path, span("root", 1, None, 0, 100), *steps))
    assert len(lines) == 3
    assert "decode x 20  20.0 ms  +10.0" in lines[2]


def test_failures_and_attributes_are_shown(tmp_path):
    failed = {"status": {"status_code": "ERROR", "description": "idle_timeout"}, "attributes": {"kvlift.tier": "large"}}
    (_, line) = printed(write(tmp_path, span("attempt", 1, None, 0, 1, **failed)))
    assert "failed: idle_timeout" in line and "tier=large" in line


def test_a_trace_is_found_by_the_beginning_of_its_id_or_is_the_latest(tmp_path):
    file = write(
        tmp_path, span("a", 1, None, 0, 1, trace="aa" * 16), span("b", 2, None, 0, 1, trace="ab" * 16), "not JSON", ""
    )
    traces = read(file)
    assert traces.skipped == 1
    assert traces.find(None)[0] == "ab" * 16
    assert traces.find("aaa")[0] == "aa" * 16
    with pytest.raises(TraceError, match="2 traces begin with 'a'"):
        traces.find("a")
    with pytest.raises(TraceError, match="0 traces begin with 'f'"):
        traces.find("f")


def test_the_command_prints_a_tree_and_says_what_is_wrong(tmp_path):
    good = write(tmp_path, span("root", 1, None, 0, 1), "x")
    done = CliRunner().invoke(build(), ["trace", str(good)])
    assert done.exit_code == 0 and "root" in done.output and "1 lines of" in done.output
    (tmp_path / "empty").write_text("")
    done = CliRunner().invoke(build(), ["trace", str(tmp_path / "empty")])
    assert done.exit_code == 1 and "no span in the file" in done.output
