"""Documents compiled by adapters on a real worker: the KV that transformers gives, and a Reader left alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from sglang_ext.documents.adapter import load_compiler
from sglang_ext.documents.link import link as link_spans
from sglang_ext.errors import DocumentError, WorkerError
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.worker import checks
from sglang_ext.worker.documents.ways import MergedWriter
from tests.worker.adapters import METHODS, random_adapter
from tests.worker.conftest import LARGE, SMALL, Fleet
from tests.worker.documents import add, ask, by_text, chat, flat, item, link, said, texts
from tests.worker.servers import first_logprobs, text
from tests.worker.test_lift import TOLERANCE, close


@pytest.mark.parametrize("method", METHODS)
def test_linking_is_the_transformers_executors(fleet: Fleet, prompt, method: str):
    executor = TransformersExecutor.from_folder(LARGE)
    compiler = load_compiler(executor, fleet.adapters[method])
    made = [prompt(length, seed=700 + length) for length in (40, 25)]
    documents = {add(fleet.paged, ids, method=method): ids for ids in made}
    blocks = dict(zip(documents, compiler.compile(made), strict=True))
    [a, b], p, q = documents, prompt(20, seed=791), prompt(17, seed=793)  # the last page has inline tokens only
    for spans in ([p, a, q], [a, q, b, q], [p, b, b, q]):
        linked = link(fleet.paged, spans, documents)
        assert linked["status"] == "applied", linked
        plan = link_spans([blocks[span] if isinstance(span, str) else span for span in spans])
        assert linked["starts"] == [one.start for one in plan.placed]
        assert linked["tokens"]["prompt"] == len(plan)
        row = executor.row(len(plan))
        for one in plan.placed:
            executor.fill_block(row, one.document.block, one.start)
        [logits] = executor.run([row], [plan.tokens.tolist()], [plan.plan])
        ids = linked["input_ids"] or flat(spans, documents)
        assert (linked["input_ids"] is None) == (method == "sempic") and len(ids) == len(plan)
        ours = first_logprobs(fleet.paged.generate(ids, extra_key=linked["namespace"]))
        expected = logits.log_softmax(-1)
        assert all(abs(expected[token] - logprob) < TOLERANCE for token, logprob in ours.items())


def test_soft_entries_in_the_last_page_which_sglang_computes_are_not_linked(fleet: Fleet, prompt):
    ids, before, after = prompt(40, seed=750), prompt(20, seed=751), prompt(3, seed=752)
    documents = {add(fleet.paged, ids, method="packet"): ids}
    linked = link(fleet.paged, [before, *documents, after], documents)
    assert linked["status"] == "fallback_prefill" and "--page-size 1" in linked["reason"]
    assert linked["tokens"]["linked"] == 0


@pytest.mark.parametrize("method", METHODS)
def test_the_reader_stays_as_it_was_to_the_bit(fleet: Fleet, prompt, method: str):
    ids, other = prompt(60, seed=710), prompt(50, seed=711)
    plain = add(fleet.paged, other)
    before = fleet.paged.generate(ids)
    fleet.paged.flush()
    compiled = add(fleet.paged, other, method=method)
    assert compiled != plain
    after = fleet.paged.generate(ids)
    assert first_logprobs(after) == first_logprobs(before) and text(after) == text(before)


def test_a_method_changes_what_is_linked(fleet: Fleet, prompt):
    ids, question = prompt(40, seed=720), prompt(9, seed=721)
    seen = []
    for method in ("plain", *METHODS):
        documents = {add(fleet.paged, ids, method=method): ids}
        linked = link(fleet.paged, [*documents, question], documents)
        whole = linked["input_ids"] or ids + question
        seen.append(first_logprobs(fleet.paged.generate(whole, extra_key=linked["namespace"])))
    assert not any(close(one, other) for number, one in enumerate(seen) for other in seen[:number])


def test_compiling_beside_running_decodes_changes_no_text(fleet: Fleet, prompt):
    watched = prompt(50, seed=730)
    undisturbed = text(fleet.paged.generate(watched, tokens=60))
    fleet.paged.flush()
    seen: list[list[int]] = []
    thread = threading.Thread(target=lambda: seen.append(text(fleet.paged.generate(watched, tokens=60))))
    thread.start()
    for number in range(6):
        add(fleet.paged, prompt(30, seed=740 + number), method=METHODS[number % 3])
    thread.join()
    assert seen == [undisturbed]


@pytest.mark.parametrize("method", METHODS)
def test_a_chat_names_its_method(fleet: Fleet, method: str):
    one = item(0)
    answer = ask(fleet.paged, chat(one, [by_text(part) for part in texts(one)], documents={"method": method}))
    told = answer["documents"]
    assert told["status"] == "applied" and said(answer)
    soft = 0 if method == "sempic" else 6
    assert told["tokens"]["linked"] == sum(part["tokens"] + soft for part in told["documents"])
    assert answer["usage"]["prompt_tokens"] == told["tokens"]["prompt"]


def test_adapters_of_another_base_and_two_of_a_method_are_refused_at_start(fleet: Fleet, tmp_path: Path):
    fits = str(fleet.adapters["sempic"])
    checks.require(checks.adapter_checks([fits], str(LARGE), None))
    with pytest.raises(WorkerError, match="was trained on 'kvlift-tiny-large'"):
        checks.require(checks.adapter_checks([fits], str(SMALL), None))
    twice = str(random_adapter(LARGE, "sempic", tmp_path / "again"))
    with pytest.raises(WorkerError, match="two adapters are for method 'sempic'"):
        checks.require(checks.adapter_checks([fits, twice], str(LARGE), None))
    with pytest.raises(WorkerError, match=r"writer\.json cannot be read"):
        checks.require(checks.adapter_checks([str(tmp_path)], str(LARGE), None))
    damaged = Path(twice) / "adapter_model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-4] + b"oops")
    with pytest.raises(WorkerError, match="SHA-256 differs"):
        checks.require(checks.adapter_checks([twice], str(LARGE), None))


class Attention(torch.nn.Module):
    """Projections as SGLang names them: two query heads of 4 and one KV head."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, rows in (("qkv_proj", 16), ("o_proj", 8)):
            projection = torch.nn.Module()
            projection.weight = torch.nn.Parameter(torch.ones(rows, 8).to(dtype), requires_grad=False)
            setattr(self, name, projection)


def lora(rows: int = 8) -> dict[str, torch.Tensor]:
    sizes = {"q_proj": rows, "k_proj": 4, "v_proj": 4, "o_proj": 8}
    pairs = {name: (torch.full((2, 8), 1.0), torch.full((size, 2), 0.5)) for name, size in sizes.items()}
    return {f"{name}.lora_{side}.weight": pair[side == "B"] for name, pair in pairs.items() for side in "AB"}


def test_the_writers_weights_are_there_only_inside():
    model = Attention()
    own = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    writer = MergedWriter(model, {f".{name}": one for name, one in lora().items()}, scale=2.0)
    with pytest.raises(KeyError), writer.writing():
        assert torch.equal(model.qkv_proj.weight, torch.full((16, 8), 1 + 2.0 * 2 * 0.5))
        raise KeyError
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == own


def test_a_model_whose_weights_cannot_take_an_adapter_is_refused():
    names = {f".{name}": one for name, one in lora().items()}
    with pytest.raises(DocumentError, match="needs plain weights"):
        MergedWriter(Attention(torch.int8), names, 1.0)
    with pytest.raises(DocumentError, match="needs plain weights"):
        MergedWriter(Attention(), {f".{name}": one for name, one in lora(rows=4).items()}, 1.0)
    with pytest.raises(DocumentError, match="has no .q_proj.lora_A"):
        MergedWriter(Attention(), lora(), 1.0)
    with pytest.raises(DocumentError, match="took 8 of them"):
        MergedWriter(Attention(), {**names, "other.lora_A.weight": torch.ones(1)}, 1.0)
