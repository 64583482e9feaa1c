"""Laws of calibration: the manifest is true, what is held out is not fitted, the same seed gives the same pack."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import count

import pytest
import torch

from sglang_ext.errors import CalibrationError
from sglang_ext.identity import ModelIdentity
from sglang_ext.offline.acceptance import Repair
from sglang_ext.offline.calibrate import calibrate
from sglang_ext.offline.collect import BATCH, HELD_OUT_EVERY
from sglang_ext.offline.executor import TransformersExecutor
from sglang_ext.offline.settings import Progress, Settings
from sglang_ext.transfer.pack import Pack
from tests.kv.builders import one_thread  # noqa: F401
from tests.kv.models import model_folder, prompts

NAMES = ("small", "large")
CORPUS = prompts(tuple(6 + n % 9 for n in range(40)), vocabulary=900)
FITTED = [ids for n, ids in enumerate(CORPUS) if n % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
HELD = [ids for n, ids in enumerate(CORPUS) if n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1]
SETTINGS = Settings(name="pack", k=2, rank=4, ridge=0.01, tokens=100_000, accept_prompts=4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two models that share a tokenizer, on disk, and a cache folder of this test's own."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLIFT_CACHE", str(root / "cache"))
        yield (
            model_folder(root / "small", "qwen3", 0, layers=2, kv_heads=1),
            model_folder(root / "large", "llama", 1, layers=3, kv_heads=2),
        )


@pytest.fixture(scope="module")
def pair(folders):
    return tuple(TransformersExecutor.from_folder(folder) for folder in folders)


def make_all(pair, corpus=CORPUS, progress=None, **settings) -> dict[str, Pack]:
    return calibrate(*pair, NAMES, "some words", iter(corpus), replace(SETTINGS, **settings), progress or Progress())


def make(pair, corpus=CORPUS, progress=None, **settings) -> Pack:
    [pack] = make_all(pair, corpus, progress, **settings).values()
    return pack


@pytest.fixture(scope="module")
def pack(pair):
    return make(pair)


def weights_of(pack: Pack, folder) -> str:
    return pack.save(folder).digest


def test_the_manifest_is_true(pack, pair):
    made = pack.manifest
    assert (made.name, made.k, made.rank, made.ridge, made.seed, made.stride) == ("pack", 2, 4, 0.01, 0, 1)
    assert (made.corpus, made.dtype, made.bench_only) == ("some words", "float32", False)
    assert made.tokens == sum(map(len, FITTED))
    for record, name, one in zip((made.source, made.target), NAMES, pair):
        assert record.name == name
        assert (record.model, record.tokenizer, record.template) == tuple(one.identity.to_json().values())
    pack.check_source(pair[0].identity, pair[0].geometry)
    pack.check_target(pair[1].identity, pair[1].geometry)
    assert len(made.layers) == len(pack.maps.layers) == 3
    for record, sides in zip(made.layers, pack.maps.layers):
        for side, one in sides.items():
            assert record[side].sources == one.sources
            assert 0 < record[side].r2 <= 1
            assert record[side].r2_held_out <= record[side].r2 + 0.2


def test_the_corpus_digest_is_that_of_the_fitted_prompts(pack):
    digest = hashlib.sha256()
    for ids in FITTED:
        digest.update(repr(ids).encode())
    assert pack.manifest.corpus_digest == digest.hexdigest()


def test_a_saved_pack_loads_as_it_was_measured(pack, tmp_path):
    saved = pack.save(tmp_path)
    assert Pack.load(tmp_path).manifest == saved.manifest


def test_held_out_prompts_are_never_fitted(pack, pair, tmp_path):
    others = iter(prompts((11, 7, 9, 8), seed=9, vocabulary=900))
    corpus = [next(others) if n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 else ids for n, ids in enumerate(CORPUS)]
    changed = make(pair, corpus)
    assert weights_of(changed, tmp_path / "a") == weights_of(pack, tmp_path / "b")
    assert changed.manifest.acceptance != pack.manifest.acceptance
    assert changed.manifest.layers != pack.manifest.layers  # the held-out R^2


def test_a_fitted_prompt_changes_the_weights(pack, pair, tmp_path):
    corpus = [prompts((12,), seed=9, vocabulary=900)[0], *CORPUS[1:]]
    assert weights_of(make(pair, corpus), tmp_path / "a") != weights_of(pack, tmp_path / "b")


def test_the_record_is_measured_on_the_held_out_prompts(pack):
    record = pack.manifest.acceptance
    assert record.target.agreement == 1.0
    assert (record.rho, record.prompts) == (0.3, len(HELD))
    assert len(record.attention_cosine) == 3


def test_no_more_prompts_are_measured_than_wanted(pair):
    assert make(pair, accept_prompts=2).manifest.acceptance.prompts == 2


def test_the_same_seed_gives_the_same_pack(pair, tmp_path):
    one, same, other = (make(pair, stride=3, seed=seed) for seed in (0, 0, 1))
    assert one.manifest == same.manifest
    digests = [weights_of(made, tmp_path / name) for made, name in zip((one, same, other), "abc")]
    assert digests[0] == digests[1] != digests[2]


def test_tokens_are_counted_after_the_stride(pair):
    found = make(pair, stride=3).manifest.tokens
    assert sum(len(ids) // 3 for ids in FITTED) <= found <= sum(-(-len(ids) // 3) for ids in FITTED)


def test_a_stride_may_be_longer_than_a_prompt(pair):
    short = prompts((3,) * 60 + (40,) * 60, vocabulary=900)
    assert make(pair, short, stride=8, k=1).manifest.tokens > 16


def test_reading_stops_when_there_are_tokens_enough(pair):
    endless = (CORPUS[n % len(CORPUS)] for n in count())
    made = make(pair, endless, tokens=300)
    assert 300 <= made.manifest.tokens <= 300 + BATCH * max(map(len, CORPUS))


def test_few_long_prompts_leave_some_to_measure_with(pair):
    """A corpus with prompts enough is measured even where the first batch has all the tokens wanted."""
    assert make(pair, tokens=40).manifest.acceptance.prompts >= 2


def test_prompts_without_two_tokens_are_left_out(pack, pair, tmp_path):
    corpus = [[], [5], *CORPUS[:8], CORPUS[8]]
    fitted = make(pair, [*corpus, *CORPUS]).manifest.tokens
    assert fitted == sum(len(ids) for n, ids in enumerate([*corpus, *CORPUS]) if n % 10 != 9 and len(ids) > 1)


def test_a_model_calibrated_onto_itself_loses_nothing(pair):
    large = pair[1]
    made = make((large, large), k=3, rank=32, ridge=1e-6)
    record = made.manifest.acceptance
    assert record.lifted.agreement == record.recovered == 1.0
    assert record.lifted.kl == pytest.approx(0.0, abs=1e-3)
    assert record.attention_cosine == pytest.approx((1.0,) * 3, abs=1e-3)
    for sides in made.manifest.layers:
        assert all(one.r2 > 0.9999 and one.r2_held_out > 0.999 for one in sides.values())
    made.manifest.check_accepted(0.95, allow_bench_only=False)


def test_the_dtype_is_that_of_the_weights(pair):
    made = make(pair, dtype="bfloat16")
    assert made.manifest.dtype == "bfloat16"
    assert {one.weight.dtype for sides in made.maps.layers for one in sides.values()} == {torch.bfloat16}


def test_a_bench_pack_is_not_measured(pair):
    made = make(pair, bench_only=True).manifest
    assert made.bench_only and made.acceptance is None


@pytest.mark.parametrize("file", ["chat_template.jinja", "tokenizer.json"])
def test_models_that_render_differently_are_refused(folders, pair, tmp_path, file):
    other = model_folder(tmp_path / "other", "llama", 1, layers=3, kv_heads=2)
    path = other / file
    path.write_text(path.read_text().replace("assistant", "helper"))
    stranger = TransformersExecutor(pair[1].model, ModelIdentity.from_folder(other))
    assert stranger.identity.model == pair[1].identity.model
    with pytest.raises(CalibrationError, match="small and large have different tokenizers or chat templates"):
        make((pair[0], stranger))


def test_an_empty_corpus_is_refused(pair):
    for nothing in ([], [[1]]):
        with pytest.raises(CalibrationError, match="some words holds no prompts"):
            make(pair, nothing)


def test_a_corpus_too_small_to_hold_any_out_is_refused(pair):
    with pytest.raises(CalibrationError, match="1 held-out prompts.*at least 20"):
        make(pair, CORPUS[:19])


def test_too_few_tokens_are_refused(pair):
    with pytest.raises(CalibrationError, match="calibration tokens cannot determine a map of 32 features"):
        make(pair, [ids[:2] for ids in CORPUS[:10]])


class NothingRuns(TransformersExecutor):
    """A model that may be asked what it is, but not to compute."""

    def compute(self, work, probe=None):
        raise AssertionError("the pass began")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"k": 3}, "k = 3.*source has 2"),
        ({"rank": 33}, "rank 33.*d_t = 32"),
        ({"structures": ("full", "head")}, "source has 1 KV heads and the target 2"),
        ({"accept_prompts": 1}, "accept_prompts is 1.*at least 2"),
    ],
)
def test_settings_that_do_not_fit_the_models_are_refused_before_the_pass(pair, settings, message):
    still = tuple(NothingRuns(one.model, one.identity) for one in pair)
    with pytest.raises(CalibrationError, match=message):
        make(still, **settings)
    with pytest.raises(AssertionError, match="the pass began"):
        make(still)


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_cache_that_is_not_finite_is_refused_with_model_and_prompt(folders, pair, held_out, number):
    """Only one word of the vocabulary is broken, and only one prompt holds it."""
    broken = TransformersExecutor.from_folder(folders[1])
    word, at = 950, 29 if held_out else 24  # prompt 30 is held out
    broken.model.model.embed_tokens.weight.data[word] = number
    corpus = [[*ids[:-1], word] if n == at else ids for n, ids in enumerate(CORPUS)]
    with pytest.raises(CalibrationError, match=f"prompt {at + 1} of the corpus, model large: .*NaN or infinite"):
        make((pair[0], broken), corpus, tokens=100_000, stride=3)


def test_several_structures_are_those_of_one_structure_each(folders, pair, tmp_path):
    """One pass, and the pack of each structure is the one that it alone would have given."""
    same_heads = TransformersExecutor.from_folder(model_folder(tmp_path / "model", "qwen3", 0, layers=2, kv_heads=2))
    models = (same_heads, pair[1])
    both = make_all(models, structures=("full", "head"))
    assert list(both) == ["full", "head"]
    for structure, pack in both.items():
        alone = make(models, structures=(structure,))
        assert pack.manifest.name == f"pack-{structure}"
        assert alone.manifest == pack.manifest.model_copy(update={"name": "pack"})
        assert weights_of(alone, tmp_path / "alone") == weights_of(pack, tmp_path / structure)
        assert Pack.load(tmp_path / structure).maps.structure == structure
    assert both["full"].manifest.acceptance != both["head"].manifest.acceptance


def test_the_acceptance_is_measured_with_the_repair_that_was_asked_for(pair):
    record = make(pair, repair=Repair("source_attention", rho=0.5)).manifest.acceptance
    assert (record.selector, record.rho, record.coverage) == ("source_attention", 0.5, None)
    assert make(pair, repair=Repair(coverage=1.0)).manifest.acceptance.rho == 1.0


def test_prompts_that_are_left_out_are_counted(pair):
    class Seen(Progress):
        count = 0

        def left_out(self, prompts):
            self.count += prompts

    seen = Seen()
    make(pair, [[], *CORPUS, [7]], seen)
    assert seen.count == 2


def test_progress_rises_to_what_was_wanted(pair):
    class Seen(Progress):
        def __init__(self):
            self.token_steps, self.prompt_steps = [], []

        def tokens(self, seen, wanted):
            self.token_steps.append((seen, wanted))

        def prompts(self, seen, wanted):
            self.prompt_steps.append((seen, wanted))

    seen = Seen()
    make(pair, progress=seen, tokens=250)
    counts = [step for step, _ in seen.token_steps]
    assert counts == sorted(counts) and counts[-1] == 250
    assert {wanted for _, wanted in seen.token_steps} == {250}
    assert seen.prompt_steps == [(n + 1, len(seen.prompt_steps)) for n in range(len(seen.prompt_steps))]
