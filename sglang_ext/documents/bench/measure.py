"""Measures time to first token of the same prompt with its documents linked and with them as plain text, in turn.

What is timed is a whole chat request over HTTP. Each request begins with words that no other had, so that nothing but
the documents is there before; the worker's prefix cache is emptied before each. The documents' order is another one in
each round.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx

from sglang_ext.documents.bench.rows import TtftRow
from sglang_ext.errors import DocumentError
from sglang_ext.offline.family.vocabulary import ITEMS, NAMES

_CHAT = "/v1/chat/completions"
_TIMEOUT_S = 1800.0
FIRST_TOKEN = "first token"
"""The phase after linking: SGLang computes the last position and sends the first event."""


@dataclass(frozen=True)
class Plan:
    """What is measured. inline: tokens that are no document's, the template's included; rounds: after a warm-up."""

    lengths: tuple[int, ...]
    documents: int = 4
    inline: int = 64
    rounds: int = 5

    @property
    def requests(self) -> int:
        return len(self.lengths) * (self.rounds + 1) * 2


@dataclass
class _Times:
    full: list[float] = field(default_factory=list)
    linked: list[float] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)


class Bench:
    """One worker under measurement. A context manager: its connection is closed at the end."""

    def __init__(self, url: str, seed: int = 0) -> None:
        """Asks who the worker is. Raises DocumentError where it does not answer as one."""
        self._client = httpx.Client(base_url=url, timeout=_TIMEOUT_S)
        self._rng = random.Random(seed)
        self.method = ""
        try:
            self.capabilities: dict[str, Any] = self._client.get("/kv/capabilities").raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise DocumentError(f"{url} is no kvlift worker: {error!r}") from error

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._client.close()

    def row(self, plan: Plan, length: int, tick: Callable[[], None]) -> TtftRow:
        """Measures one length. Calls `tick` after each timed request. Raises DocumentError where one is refused."""
        documents, compile_ms = self._compiled(plan.documents, length)
        # How many tokens the template adds is not known before one prompt was rendered.
        self._flush()
        words = plan.inline
        _, told = self._first_token(self._body(documents, words, linked=True))
        words -= told["tokens"]["computed"] - plan.inline
        if words < len(documents) + 1:
            raise DocumentError(f"{plan.inline} inline tokens are too few: the chat template alone has more than that")
        times = _Times()
        for round_ in range(plan.rounds + 1):
            self._rng.shuffle(documents)
            self._flush()
            full_ms, _ = self._first_token(self._body(documents, words, linked=False))
            tick()
            self._flush()
            linked_ms, told = self._first_token(self._body(documents, words, linked=True))
            tick()
            self._check(told, length, len(documents))
            if round_:  # the first one warms up
                times.full.append(full_ms)
                times.linked.append(linked_ms)
                times.phases.append(_phases(told["ms"], linked_ms))
        return _row(plan, length, told["tokens"], times, compile_ms)

    def _compiled(self, count: int, length: int) -> tuple[list[str], float]:
        """Texts of `length` tokens each, compiled, and the median time that this took."""
        texts, times = [], []
        for _ in range(count):
            text = self._text(length)
            started = time.perf_counter()
            added = self._post("/v1/documents", {"text": text})
            times.append((time.perf_counter() - started) * 1e3)
            tokens, self.method = added["tokens"], added["method"]
            while tokens != length:  # with this tokenizer a word is not a token: shorter or longer, until it fits
                text = self._text(max(1, round(len(text.split()) * length / tokens) + self._rng.choice((-1, 0, 1))))
                tokens = self._post("/v1/documents", {"text": text})["tokens"]
            texts.append(text)
        return texts, median(times)

    def _body(self, documents: Sequence[str], words: int, linked: bool) -> dict[str, Any]:
        """A streamed chat request of one token: words, a document, words, a document, ..., words."""
        kind = "document" if linked else "text"
        shares = [words // (len(documents) + 1)] * len(documents)
        content: list[dict[str, str]] = []
        for document, share in zip(documents, shares, strict=True):
            content += [{"type": "text", "text": self._text(share)}, {"type": kind, "text": document}]
        content.append({"type": "text", "text": self._text(words - sum(shares))})
        joined = content if linked else "".join(part["text"] for part in content)
        return {
            "model": self.capabilities["model"], "messages": [{"role": "user", "content": joined}], "stream": True,
            "max_tokens": 1, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip

    def _text(self, words: int) -> str:
        return "".join(f" {self._rng.choice((*NAMES, *ITEMS))}" for _ in range(words))

    def _first_token(self, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        """Milliseconds to the first event, and what it tells of the documents."""
        started = time.perf_counter()
        first_ms, told = None, {}
        with self._client.stream("POST", _CHAT, json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise DocumentError(f"the worker refused a request: {reply.text[:300]}")
            for line in reply.iter_lines():
                if first_ms is None and line.startswith("data: {"):
                    first_ms = (time.perf_counter() - started) * 1e3
                    told = json.loads(line.removeprefix("data: ")).get("documents") or {}
        if first_ms is None:
            raise DocumentError("the worker ended an answer without any event")
        return first_ms, told

    def _check(self, told: dict[str, Any], length: int, documents: int) -> None:
        """Raises DocumentError unless all documents were linked, and came from memory."""
        origins = {one["from"] for one in told["documents"]}
        if told["tokens"]["linked"] != length * documents or origins != {"memory"}:
            raise DocumentError(
                f"of {documents} documents of {length} tokens only {told['tokens']['linked']} tokens were linked, from "
                f"{', '.join(sorted(origins))}: give the worker more --documents-bytes"
            )

    def _flush(self) -> None:
        self._client.post("/flush_cache", params={"timeout": 60}).raise_for_status()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        reply = self._client.post(path, json=body)
        if reply.status_code != 200:
            raise DocumentError(f"the worker refused a document: {reply.text[:300]}")
        return reply.json()


def _phases(ms: dict[str, float], linked_ms: float) -> dict[str, float]:
    """What the worker tells of linking, the rest of that, and what came after it."""
    inside = {name: value for name, value in ms.items() if name != "total"}
    return {**inside, "other": ms["total"] - sum(inside.values()), FIRST_TOKEN: linked_ms - ms["total"]}


def _row(plan: Plan, length: int, tokens: dict[str, int], times: _Times, compile_ms: float) -> TtftRow:
    return TtftRow(
        documents=plan.documents, length=length, prompt=tokens["prompt"], computed=tokens["computed"],
        full_ms=median(times.full), linked_ms=median(times.linked),
        ratio=median(full / linked for full, linked in zip(times.full, times.linked, strict=True)),
        compile_ms=compile_ms,
        phases_ms={name: median(one[name] for one in times.phases) for name in times.phases[0]},
        rounds=plan.rounds, full_range_ms=(min(times.full), max(times.full)),
        linked_range_ms=(min(times.linked), max(times.linked)),
    )  # fmt: skip
