"""One load after another on the same servers, each from the same start: idle, and with known caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import gevent

from loadtest.errors import LoadFailed, Stopped
from loadtest.generator import OpenLoop, Tags
from loadtest.lineup import SMALL, Entry, entry
from loadtest.prompts import Prompts, for_arrivals
from loadtest.rows import Row
from loadtest.schedule import Arrival, at_once
from loadtest.servers import Counted, Servers
from loadtest.systems import System


@dataclass(frozen=True, slots=True)
class Load:
    """What one load came to. `rows` in order of arrival."""

    rows: list[Row]
    counted: Counted


class Bench:
    """Prompts of a seed are the same for every system and rate; a change of seed or length prefills the source anew."""

    def __init__(self, servers: Servers, prompts: Prompts) -> None:
        self._servers = servers
        self._prompts = prompts
        self._entries: dict[str, Entry] = {}
        self._held: Mapping[int, str] = {}  # the prompts that the source holds
        self._loop: OpenLoop | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ends the load in progress; it and every later one raise `Stopped`."""
        self._stopped = True
        if self._loop is not None:
            self._loop.stop()

    def entry(self, name: str) -> Entry:
        """The same one each time: its connections are kept from load to load. Raises `BadSystem`."""
        if name not in self._entries:
            self._entries[name] = entry(name, self._servers)
        return self._entries[name]

    def texts(self, arrivals: Sequence[Arrival], seed: int, tokens: int) -> dict[int, str]:
        """The prompts of these arrivals. Raises `BadPrompt`."""
        return for_arrivals(self._prompts, arrivals, seed, tokens)

    def prepare(self, entry: Entry, texts: Mapping[int, str]) -> None:
        """Idle servers, an empty target, and a source that holds what the system needs.

        Raises `TargetDown`, `ServerFault`, `LoadFailed` or `Stopped`.
        """
        self._servers.target.flush()
        source = self._servers.source
        if source is None or entry.source is None:
            return
        if entry.source == "empty":
            source.flush()
            self._held = {}
        elif any(self._held.get(index) != text for index, text in texts.items()):
            source.flush()
            self._held = {}
            arrivals = [Arrival(index, 0.0) for index in sorted(texts)]
            require_all(self._send(self.entry(SMALL).system, arrivals, texts, Tags(seed=0), lambda _: None))
            self._held = dict(texts)

    def load(
        self,
        entry: Entry,
        arrivals: Sequence[Arrival],
        texts: Mapping[int, str],
        tags: Tags,
        on_row: Callable[[Row], None] = lambda _: None,
    ) -> Load:
        """Sends all, waits for all. Raises what `OpenLoop.run` does, or `Stopped`; `on_row` has had the rows so far."""
        before = entry.counts.counted()
        rows = self._send(entry.system, arrivals, texts, tags, on_row)
        return Load(rows, entry.counts.counted().since(before))

    def warm_up(self, entry: Entry, count: int, seed: int, tokens: int) -> None:
        """One load that nobody counts: the first of a process is slower than all that follow."""
        arrivals = at_once(count)
        texts = self.texts(arrivals, seed, tokens)
        self.prepare(entry, texts)
        self.load(entry, arrivals, texts, Tags(seed=seed))

    def _send(
        self,
        system: System,
        arrivals: Sequence[Arrival],
        texts: Mapping[int, str],
        tags: Tags,
        on_row: Callable[[Row], None],
    ) -> list[Row]:
        rows: list[Row] = []

        def keep(row: Row) -> None:
            rows.append(row)
            on_row(row)

        gevent.sleep(0)  # a signal that came while nothing was in flight is taken here
        if self._stopped:
            raise Stopped("stopped before the next load")
        self._loop = OpenLoop(system, arrivals, texts, tags, keep)
        try:
            tally = self._loop.run()
        finally:
            self._loop = None
        if tally.stopped:
            raise Stopped(f"stopped in mid-load: {tally.sent} of {tally.planned} requests were sent")
        return sorted(rows, key=lambda row: row.index)


def require_all(rows: Sequence[Row]) -> None:
    """Raises `LoadFailed` where one request failed: for loads of which only the whole counts."""
    failed = [row for row in rows if row.error is not None]
    if failed:
        raise LoadFailed(
            f"{len(failed)} of {len(rows)} requests to {rows[0].system} failed; the first: {failed[0].error}"
        )
