"""The Grafana dashboard asks only for what `/metrics` has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.router.fake_worker import UNSURE, applied, until

BOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "kvlift.json"
_QUERY = re.compile(r"(kvlift_[a-z_]+)(?:\{([^}]*)\})?")
_MATCH = re.compile(r'([a-z_]+)(?:=~|!~|!=|=)"')
_BY = re.compile(r"by \(([a-z_, ]+)\)")


def panels() -> list[dict[str, Any]]:
    return [panel for panel in json.loads(BOARD.read_text())["panels"] if panel["type"] != "row"]


@pytest.fixture(scope="module")
def labels_of() -> dict[str, set[str]]:
    """The samples of a router that has seen everything once, and their labels."""
    from contextlib import ExitStack

    from tests.router.conftest import House

    with ExitStack() as stack:
        house = House(stack)
        house.small.script.queued = 1
        house.small.script.logprob, house.large.script.lift = UNSURE, applied()
        house.stream()
        house.ask(model="nobody")
        until(lambda: house.gateway.monitor["small"].queued == 1)  # told at the next probe
        families = text_string_to_metric_families(house.http.get("/metrics").text)
        return {s.name: set(s.labels) for family in families for s in family.samples}


def test_every_metric_and_label_of_the_dashboard_exists(labels_of):
    asked = set()
    for panel in panels():
        for target in panel["targets"]:
            found = _QUERY.findall(target["expr"])
            asked |= {name for name, _ in found}
            for name, matchers in found:
                assert name in labels_of, f"{panel['title']}: no metric {name}"
                assert set(_MATCH.findall(matchers)) <= labels_of[name], f"{panel['title']}: {target['expr']}"
            told = {label for name, _ in found for label in labels_of[name]}
            grouped = {label.strip() for by in _BY.findall(target["expr"]) for label in by.split(",")}
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert grouped <= told and legend <= (grouped or told), f"{panel['title']}: {target['expr']}"
    assert len(asked) > 15


def test_every_metric_has_a_panel(labels_of):
    text = BOARD.read_text()
    bases = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in labels_of}
    shown = {name for name in bases if name in text}
    assert bases - shown - {name for name in bases if f"{name}_total" in bases} == {"kvlift_worker_lifts"}


def test_panels_have_one_place_each_and_numbers_of_their_own():
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
