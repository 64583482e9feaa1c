"""What `/metrics` says, as numbers."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


class Scrape:
    """One reading. `house` is a test's house, or anything with `http`."""

    def __init__(self, http: httpx.Client, **headers: str) -> None:
        reply = http.get("/metrics", headers=headers)
        assert reply.status_code == 200, reply.text
        self.samples = [s for family in text_string_to_metric_families(reply.text) for s in family.samples]

    def __call__(self, name: str, **labels: Any) -> float:
        """The sum over all series of the name that have these labels."""
        return sum(s.value for s in self.samples if s.name == name and labels.items() <= s.labels.items())

    def series(self) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(s.name, tuple(sorted(s.labels.items()))) for s in self.samples}
