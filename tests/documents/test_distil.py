"""Laws of distillation: the loss is equation 8, the student is the linked Reader, and a run is a function of its seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from typer.testing import CliRunner

from sglang_ext.documents.checkpointing import checkpointed, direct
from sglang_ext.documents.cli import documents as app
from sglang_ext.documents.compilers import Compiler
from sglang_ext.documents.corpus import Corpus, Record
from sglang_ext.documents.distil import Distillation, distillation_loss, train
from sglang_ext.documents.link import link
from sglang_ext.documents.settings import Progress, TrainSettings
from sglang_ext.documents.student import Student
from sglang_ext.documents.teacher import Target, TeacherCache, teach
from sglang_ext.documents.trainable import Trainable
from sglang_ext.errors import CalibrationError, DocumentError
from sglang_ext.offline.checkpoint import Checkpoint
from tests.documents.writers import KINDS, METHODS, corpus, record, trainable
from tests.kv.builders import one_thread, random, same_bits  # noqa: F401
from tests.kv.models import VOCABULARY, executor, model_folder

CORPUS = corpus(7)
SETTINGS = TrainSettings(method="joint", rank=2, soft=2, epochs=3, batch=3, microbatch=2, rate=5e-3)
ANSWER = 5


class Killed(BaseException):
    """The process ends here."""


class KilledAfter(Progress):
    """Ends the training after a number of updates; remembers where it went on."""

    def __init__(self, updates: int = 10**9) -> None:
        self.left = updates
        self.resumed_at: int | None = None

    def updates(self, seen: int, wanted: int, loss: float | None) -> None:
        if loss is not None:
            self.left -= 1
        if self.left == 0:
            raise Killed

    def resumed(self, updates: int) -> None:
        self.resumed_at = updates


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    cache = TeacherCache(tmp_path_factory.mktemp("teacher"), VOCABULARY, torch.float32)
    teach(executor("qwen3"), CORPUS.records, cache, ANSWER, [0], lambda seen: None)
    return cache


def trained(
    teacher, checkpoint: Checkpoint | None = None, progress: Progress | None = None, **settings
) -> Distillation:
    chosen = SETTINGS.model_copy(update=settings)
    run = Distillation(Trainable(executor("qwen3"), chosen), CORPUS, teacher, direct)
    train(run, CORPUS, {"settings": repr(chosen)}, checkpoint, progress or Progress())
    return run


@pytest.fixture(scope="module")
def uninterrupted(teacher):
    return trained(teacher)


def assert_same(one: Distillation, other: Distillation) -> None:
    mine, theirs = one.state(), other.state()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert same_bits(tensor, theirs[name]), name


def test_the_loss_is_equation_8():
    teacher, student = random(0, 6, 11), random(1, 6, 11)
    for temperature in (1.0, 2.5):
        q, p = (side.div(temperature).softmax(-1) for side in (teacher, student))
        expected = temperature**2 * (q * (q / p).log()).sum()
        torch.testing.assert_close(distillation_loss(teacher, student, temperature), expected)
    assert float(distillation_loss(teacher, teacher)) == pytest.approx(0, abs=1e-6)


def test_the_loss_sends_no_gradient_to_the_teacher():
    teacher, student = random(0, 6, 11).requires_grad_(), random(1, 6, 11).requires_grad_()
    distillation_loss(teacher, student).backward()
    assert teacher.grad is None and student.grad.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_student_is_the_linked_reader(kind, method):
    """Teacher-forced logits of training are those that the executor gives for the linked prompt of a compiled document."""
    made = trainable(kind, method)
    one, answer = record(3), [3, 1, 4, 1]
    found = made.student(checkpointed).logits([record(1), one], [[2], answer])[1].detach()
    compiler = Compiler(made.executor, made.writer and made.writer.writing, envelope(made))
    texts = [ids for ids, is_document in one.spans if is_document]
    compiled = iter(compiler.compile(texts))
    spans = [next(compiled) if is_document else ids for ids, is_document in one.spans]
    for count, logits in enumerate(found):
        linked = link([*spans, answer[:count]])
        row = made.executor.row(len(linked))
        for placed in linked.placed:
            made.executor.fill_block(row, placed.document.block, placed.start)
        expected = made.executor.run([row], [linked.tokens.tolist()], [linked.plan])[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def envelope(made):
    from sglang_ext.documents.compilers import Envelope

    return None if made.header is None else Envelope(made.header.detach(), made.trailer.detach())


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_document_at_the_front_and_no_adapter_the_student_is_the_teacher(kind, tmp_path):
    """The one document that is compiled behind its true prefix, which is none."""
    one = executor(kind)
    records = [Record((((5, 9, 2, 8, 8), True), ((3, 7), False)))]
    cache = TeacherCache(tmp_path, VOCABULARY, torch.float32)
    teach(one, records, cache, ANSWER, [0], lambda seen: None)
    target = cache[0]
    [logits] = Student(one).logits(records, [target.answer])
    assert float(distillation_loss(target.logits, logits)) < 1e-6
    torch.testing.assert_close(logits, target.logits, atol=2e-4, rtol=1e-4)


def test_a_microbatch_equals_its_records_one_by_one():
    student = trainable("qwen3", "joint").student(direct)
    records, answers = [record(0), record(1, (4,)), record(2)], [[1], [2, 3], [4, 5, 6]]
    together = student.logits(records, answers)
    for one, answer, logits in zip(records, answers, together, strict=True):
        torch.testing.assert_close(student.logits([one], [answer])[0], logits, atol=1e-4, rtol=1e-4)


def test_the_teacher_answers_greedily_and_its_logits_say_so(teacher):
    one = executor("qwen3")
    for index, given in enumerate(CORPUS.records):
        target = teacher[index]
        assert target.logits.argmax(-1).tolist() == target.answer
        assert len(target.answer) <= ANSWER and (len(target.answer) == ANSWER or target.answer[-1] == 0)
        rows, logits = one.prefill([given.prompt], spare=ANSWER)
        [answer] = one.greedy(rows, logits, ANSWER, [0])
        assert target.answer[: len(answer)] == answer


def test_an_answer_ends_with_the_stop_token_that_the_teacher_chose(tmp_path):
    one = executor("qwen3")
    free = TeacherCache(tmp_path / "free", VOCABULARY, torch.float32)
    teach(one, CORPUS.records[:1], free, 4, [VOCABULARY - 1], lambda seen: None)
    second = free[0].answer[1]
    cache = TeacherCache(tmp_path / "stopped", VOCABULARY, torch.float32)
    teach(one, CORPUS.records[:1], cache, 4, [VOCABULARY - 1, second], lambda seen: None)
    assert cache[0].answer == free[0].answer[: free[0].answer.index(second) + 1]


@pytest.mark.parametrize("lost", [("logits.bin", 3), ("answers.jsonl", 2), ("answers.jsonl", 40), ("both", 1)])
def test_a_killed_teacher_goes_on_and_gives_the_same(tmp_path, teacher, lost):
    """Whatever a kill left half written is written again; what was whole is not asked again."""
    name, count = lost
    for file in ("logits.bin", "answers.jsonl"):
        (tmp_path / file).write_bytes((teacher.folder / file).read_bytes())
    lines = tmp_path / "answers.jsonl"
    if name == "logits.bin":  # the last line was not written, its logits half
        whole = lines.read_bytes().splitlines(keepends=True)
        lines.write_bytes(b"".join(whole[:-1]))
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - count)
    else:
        os.truncate(lines, max(0, lines.stat().st_size - count))
    cache = TeacherCache(tmp_path, VOCABULARY, torch.float32)
    assert len(cache) < len(teacher)
    teach(executor("qwen3"), CORPUS.records, cache, ANSWER, [0], lambda seen: None)
    again = TeacherCache(tmp_path, VOCABULARY, torch.float32)
    assert len(again) == len(teacher)
    for index in range(len(teacher)):
        assert again[index].answer == teacher[index].answer
        torch.testing.assert_close(again[index].logits, teacher[index].logits, atol=1e-4, rtol=1e-4)


def test_a_cache_whose_logits_are_gone_is_refused(tmp_path):
    cache = TeacherCache(tmp_path, 4, torch.bfloat16)
    cache.append(Target([1, 2], torch.ones(2, 4)))
    assert cache[0].logits.dtype == torch.bfloat16 and cache[0].logits.shape == (2, 4)
    os.truncate(tmp_path / "logits.bin", 7)
    with pytest.raises(DocumentError, match="shorter than its answers say"):
        TeacherCache(tmp_path, 4, torch.bfloat16)


def test_training_lowers_the_loss(uninterrupted):
    assert uninterrupted.epoch_losses[-1] < 0.8 * uninterrupted.epoch_losses[0]


def test_the_rate_falls_to_zero_and_every_record_is_seen_once_an_epoch(teacher, monkeypatch):
    seen, rates = [], []
    whole = Distillation._accumulate
    monkeypatch.setattr(
        Distillation, "_accumulate", lambda self, chosen: (seen.append(list(chosen)), whole(self, chosen))
    )
    run = Distillation(Trainable(executor("qwen3"), SETTINGS), CORPUS, teacher, direct)
    while run.done < run.steps:
        run.step()
        rates.append(run._optimizer.param_groups[0]["lr"])
    assert run.steps == 9 and rates == pytest.approx([5e-3 * (9 - n) / 9 for n in range(9)])
    epochs = [[index for chosen in seen[n : n + 5] for index in chosen] for n in range(0, 15, 5)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs) and epochs[0] != epochs[1]


def test_one_seed_gives_one_adapter(teacher, uninterrupted):
    assert_same(trained(teacher), uninterrupted)
    other = trained(teacher, seed=1)
    assert not all(one.equal(other.state()[name]) for name, one in uninterrupted.state().items())


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("updates", [1, 3, 8])
def test_wherever_it_ends_the_next_gives_the_same_adapter(teacher, uninterrupted, tmp_path, every, updates):
    checkpoint = Checkpoint(tmp_path / "adapter", every)
    with pytest.raises(Killed):
        trained(teacher, checkpoint, KilledAfter(updates))
    seen = KilledAfter()
    assert_same(trained(teacher, checkpoint, seen), uninterrupted)
    kept = updates // every * every
    assert seen.resumed_at == (kept or None)


def test_a_checkpoint_of_other_settings_is_refused(teacher, tmp_path):
    checkpoint = Checkpoint(tmp_path / "adapter", 1)
    with pytest.raises(Killed):
        trained(teacher, checkpoint, KilledAfter(2))
    with pytest.raises(CalibrationError, match="settings was"):
        trained(teacher, checkpoint, rate=1e-3)


def test_a_checkpoint_of_other_records_is_refused(teacher, tmp_path):
    checkpoint = Checkpoint(tmp_path / "adapter", 1)
    trained(teacher, checkpoint)
    run = Distillation(Trainable(executor("qwen3"), SETTINGS), CORPUS, teacher, direct)
    other = Corpus(CORPUS.records[:-1])
    with pytest.raises(CalibrationError, match="made for other records"):
        train(run, other, {"settings": repr(SETTINGS)}, checkpoint, Progress())


def test_a_loss_that_is_no_number_ends_the_training(teacher):
    run = Distillation(Trainable(executor("qwen3"), SETTINGS), CORPUS, teacher, direct)
    with torch.no_grad():
        run.trainable.header.fill_(float("nan"))
    with pytest.raises(DocumentError, match="the loss of update 1 is nan"):
        run.step()


def words(model, out) -> list[str]:
    return [
        "train", "--model", str(model), "--data", "tiny:9", "--out", str(out), "--method", "joint", "--rank", "2",
        "--soft", "2", "--epochs", "4", "--batch", "3", "--microbatch", "2", "--answer", "4", "--dtype", "float32",
        "--checkpoint-every", "1",
    ]  # fmt: skip


def test_a_killed_command_goes_on_and_gives_the_same_files(tmp_path, monkeypatch):
    """The real thing: SIGKILL in the middle of the training, and the same command again."""
    monkeypatch.setenv("KVLIFT_CACHE", str(tmp_path / "cache"))
    model = model_folder(tmp_path / "model", "qwen3", 0, layers=2)
    checkpoint = Checkpoint(tmp_path / "killed")
    code = "from sglang_ext.documents.cli import documents; documents()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *words(model, tmp_path / "killed")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    ) as running:  # fmt: skip
        while running.poll() is None and not checkpoint.path.exists():
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    assert running.returncode == -signal.SIGKILL
    assert checkpoint.path.exists() and not (tmp_path / "killed" / "writer.json").exists()
    again, whole = (CliRunner().invoke(app, words(model, tmp_path / name)) for name in ("killed", "whole"))
    assert (again.exit_code, whole.exit_code) == (0, 0), again.output + whole.output
    assert "going on from a checkpoint" in again.stderr and "going on" not in whole.stderr
    files = {path.name for path in (tmp_path / "whole").iterdir()}
    assert {"writer.json", "adapter_config.json", "adapter_model.safetensors", "soft_tokens.safetensors"} <= files
    for name in files:
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not checkpoint.path.exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"--data": "tiny:none"}, "expected tiny:N"),
        ({"--data": "nowhere.jsonl"}, "nowhere.jsonl does not exist"),
        ({"--alpha": "0"}, "alpha: Input should be greater than 0"),
    ],
)
def test_bad_input_is_named(tmp_path, given, message):
    model = model_folder(tmp_path / "model", "qwen3", 0, layers=1)
    asked = dict(zip(words(model, tmp_path / "out")[1::2], words(model, tmp_path / "out")[2::2], strict=True))
    done = CliRunner().invoke(app, ["train", *(word for pair in {**asked, **given}.items() for word in pair)])
    assert done.exit_code == 1 and message in done.stderr
