"""The bench of linked documents, before a scripted worker: what it sends, and what it makes of the answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from rich.console import Console
from starlette.responses import JSONResponse, Response, StreamingResponse
from typer.testing import CliRunner

from sglang_ext.documents.bench.measure import FIRST_TOKEN, Bench, Plan
from sglang_ext.documents.bench.report import bench_worker
from sglang_ext.documents.bench.rows import TtftResult, TtftRow
from sglang_ext.documents.cli import documents
from sglang_ext.errors import DocumentError
from tests.router.fake_worker import serving

TEMPLATE = 7  # tokens that the scripted worker's chat template adds


@dataclass
class Script:
    """A worker for which each word is a token, with a template of its own. `origin`: where documents come from."""

    origin: str = "memory"
    status: int = 200
    calls: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.get("/kv/capabilities")
        async def capabilities() -> dict[str, str]:
            return {"model": "scripted", "model_digest": "d", "kernels": "torch"}

        @app.post("/v1/documents")
        async def add(request: Request) -> dict[str, Any]:
            return {"tokens": len((await request.json())["text"].split()), "method": "plain"}

        @app.post("/flush_cache")
        async def flush() -> Response:
            self.calls.append("flush")
            return Response()

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            body = await request.json()
            content = body["messages"][0]["content"]
            self.calls.append("full" if isinstance(content, str) else "linked")
            self.bodies.append(body)
            if self.status != 200:
                return JSONResponse({"error": "no"}, self.status)
            event = {"choices": []} if isinstance(content, str) else {"choices": [], "documents": self._told(content)}
            return StreamingResponse(iter([f"data: {json.dumps(event)}\n\n", "data: [DONE]\n\n"]))

        return app

    def _told(self, content: list[dict[str, str]]) -> dict[str, Any]:
        counts = {
            kind: [len(part["text"].split()) for part in content if part["type"] == kind]
            for kind in ("text", "document")
        }
        linked, inline = sum(counts["document"]), sum(counts["text"]) + TEMPLATE
        tokens = {"prompt": linked + inline, "linked": linked, "computed": inline}
        told = [{"from": self.origin} for _ in counts["document"]]
        return {"tokens": tokens, "documents": told, "ms": {"write": 1.0, "inline": 2.0, "total": 4.0}}


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    with serving(script.app()) as address:
        yield address


def test_both_ways_alternate_each_before_an_empty_cache(script: Script, url: str):
    plan = Plan((20,), documents=3, inline=30, rounds=2)
    ticks: list[int] = []
    with Bench(url) as bench:
        row = bench.row(plan, 20, lambda: ticks.append(1))
    assert script.calls == ["flush", "linked"] + ["flush", "full", "flush", "linked"] * 3
    assert len(ticks) == plan.requests == 6
    assert (row.prompt, row.computed, row.documents, row.length, row.rounds) == (90, 30, 3, 20, 2)
    assert row.phases_ms["write"] == 1.0 and row.phases_ms["other"] == 1.0
    assert sum(row.phases_ms.values()) == pytest.approx(row.phases_ms[FIRST_TOKEN] + 4.0)


def test_prompts_have_the_same_tokens_either_way_and_begin_differently(script: Script, url: str):
    with Bench(url) as bench:
        bench.row(Plan((20,), documents=3, inline=30, rounds=2), 20, lambda: None)
    texts = []
    for body in script.bodies[1:]:
        content = body["messages"][0]["content"]
        whole = content if isinstance(content, str) else "".join(part["text"] for part in content)
        texts.append(whole)
        assert len(whole.split()) == 3 * 20 + 30 - TEMPLATE
        assert body["stream"] and body["max_tokens"] == 1
    assert len({text.split()[0:5].__str__() for text in texts}) == len(texts)


def test_documents_that_were_not_in_memory_are_no_hit(script: Script, url: str):
    script.origin = "compiled"
    with Bench(url) as bench, pytest.raises(DocumentError, match="from compiled"):
        bench.row(Plan((20,), rounds=1), 20, lambda: None)


def test_too_few_inline_tokens_are_refused(url: str):
    with Bench(url) as bench, pytest.raises(DocumentError, match="too few"):
        bench.row(Plan((20,), inline=TEMPLATE, rounds=1), 20, lambda: None)


def test_a_worker_that_refuses_is_quoted(script: Script, url: str):
    script.status = 503
    with Bench(url) as bench, pytest.raises(DocumentError, match="refused a request"):
        bench.row(Plan((20,), rounds=1), 20, lambda: None)


def test_rows_go_to_the_file_and_a_picture_beside_it(url: str, tmp_path: Path):
    out = tmp_path / "results" / "ttft.json"
    with (tmp_path / "shown").open("w") as shown:
        bench_worker(url, Path(), Plan((10, 40), documents=2, inline=30, rounds=1), out, Console(file=shown, width=160))
    result = TtftResult.model_validate_json(out.read_text())
    assert [row.length for row in result.rows] == [10, 40] and result.model == "scripted" and result.method == "plain"
    assert set(TtftRow.model_fields) >= {"full_ms", "linked_ms", "ratio"}
    assert out.with_suffix(".png").stat().st_size > 10_000
    assert "full prefill" in (tmp_path / "shown").read_text()


@pytest.mark.parametrize(("options", "named"), [(["--lengths", "1,x"], "--lengths"), (["--lengths", "0"], "--lengths")])
def test_wrong_options_are_named(options: list[str], named: str):
    done = CliRunner().invoke(documents, ["bench", "--worker", "http://127.0.0.1:9", *options])
    assert done.exit_code != 0 and named in done.output


def test_no_worker_is_an_error_that_says_so(tmp_path: Path):
    done = CliRunner().invoke(documents, ["bench", "--worker", "http://127.0.0.1:9", "--out", str(tmp_path / "x.json")])
    assert done.exit_code == 1 and "is no kvlift worker" in done.output
