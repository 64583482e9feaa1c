"""Laws of the document store: content addresses, tenants, bounds, and files that are not what they claim to be."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.documents.lru import SizedLRU
from sglang_ext.documents.mooncake_storage import Master, MooncakeStorage
from sglang_ext.documents.record import DocumentRecord, block_key, tenant_of
from sglang_ext.documents.storage import FileStorage, NoStorage
from sglang_ext.documents.store import DocumentStore
from sglang_ext.errors import DocumentError
from sglang_ext.rope import RopeSpec
from tests.kv.builders import geometry, identity, laws
from tests.mooncake import HAS_MOONCAKE, StoreMaster

PLENTY = 1 << 20


def record(text: str = " A fact.", salt: str | None = None, method="plain", ttl: float | None = None) -> DocumentRecord:
    ids = [ord(letter) for letter in text]
    return DocumentRecord.of(text, ids, method, salt, "tokenizer", ttl)


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreMaster]:
    if not HAS_MOONCAKE:
        pytest.skip("Mooncake is not installed")
    started = StoreMaster(tmp_path_factory.mktemp("master"))
    yield started
    started.stop()


@pytest.fixture(scope="module")
def member(master: StoreMaster) -> MooncakeStorage:
    return join(master)


@pytest.fixture
def joined(master: StoreMaster, member: MooncakeStorage) -> Iterator[Callable[[], MooncakeStorage]]:
    """Joins one and the same Mooncake store, empty, as a worker does."""
    yield lambda: join(master)
    member.delete_all("doc-")


def join(master: StoreMaster) -> MooncakeStorage:
    return MooncakeStorage(Master.parse(master.url), "127.0.0.1", "tcp", "", 32 << 20)


@pytest.fixture(params=["memory", "folder", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> DocumentStore:
    if request.param == "mooncake":
        request.getfixturevalue("joined")
        return DocumentStore(request.getfixturevalue("member"))
    return DocumentStore(NoStorage() if request.param == "memory" else FileStorage(tmp_path, PLENTY))


def files(folder: Path, kind: str) -> list[Path]:
    """Of records, or of blocks."""
    return [path for path in folder.glob("*.bin") if (".record" in path.name) == (kind == "record")]


@laws
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 30), st.integers(0, 9)), max_size=60))
def test_what_is_held_is_within_the_limit_and_what_was_used_last(steps: list[tuple[int, int, int]]):
    """Each step puts one key in and asks for another; a plain list, the last used at its end, tells what is held."""
    held: SizedLRU[int, int] = SizedLRU(50, lambda size: size)
    model: list[tuple[int, int]] = []
    for key, size, asked in steps:
        held.put(key, size)
        model = [one for one in model if one[0] != key] + [(key, size)]
        while sum(one[1] for one in model) > 50:
            model.pop(0)
        found = [one for one in model if one[0] == asked]
        assert held.get(asked) == (found[0][1] if found else None)
        model = [one for one in model if one not in found] + found
        assert held.values() == [size for _, size in model] and held.size == sum(held.values()) <= 50


def test_what_is_over_the_limit_is_not_kept_and_drives_nothing_out():
    held: SizedLRU[str, bytes] = SizedLRU(10, len)
    held.put("small", b"123")
    held.put("large", b"x" * 11)
    assert "large" not in held and held.get("small") == b"123"


def test_an_id_is_the_contents_and_nothing_elses():
    assert record().id == record().id
    others = [record(" Another."), record(salt="a"), record(salt=""), record(method="sempic")]
    other_tokenizer = DocumentRecord.of(" A fact.", record().ids, "plain", None, "other", None)
    assert len({one.id for one in (record(), other_tokenizer, *others)}) == 6


def test_kv_of_another_model_adapter_rope_dtype_or_document_has_another_key():
    """Case 49: whatever changes the numbers is a miss."""
    shape = geometry()
    turned = replace(shape, rope=RopeSpec("linear", 10000.0, 4, factor=2.0))
    keys = {
        block_key(record(), identity(), shape, torch.float32, None),
        block_key(record(), identity("other"), shape, torch.float32, None),
        block_key(record(), identity(), turned, torch.float32, None),
        block_key(record(), identity(), shape, torch.bfloat16, None),
        block_key(record(), identity(), shape, torch.float32, "adapter"),
        block_key(record(" Another."), identity(), shape, torch.float32, None),
    }
    assert len(keys) == 6
    assert block_key(record(), identity(), shape, torch.float32, None) in keys


def test_a_document_is_found_until_it_is_deleted(store: DocumentStore):
    put = store.put(record())
    assert store.find(put.id, put.tenant) == put
    assert store.listed(put.tenant) == [put]
    store.delete(put)
    assert store.find(put.id, put.tenant) is None and store.listed(put.tenant) == []


def test_another_tenant_finds_nothing(store: DocumentStore):
    """Case 44."""
    put = store.put(record(salt="a"))
    for salt in ("b", "", None):
        assert store.find(put.id, tenant_of(salt)) is None and store.listed(tenant_of(salt)) == []
    assert store.find(put.id, tenant_of("a")) == put


def test_the_same_content_again_is_the_same_document_with_the_new_end(store: DocumentStore):
    first = store.put(record(ttl=1000))
    second = store.put(record(ttl=None))
    assert (second.id, second.created, second.expires) == (first.id, first.created, None)
    assert store.listed(first.tenant) == [second]


def test_a_document_whose_time_is_over_is_gone(store: DocumentStore, monkeypatch: pytest.MonkeyPatch):
    put = store.put(record(ttl=10))
    assert store.find(put.id, put.tenant) == put
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 11)
    assert store.find(put.id, put.tenant) is None and store.listed(put.tenant) == []


@pytest.mark.parametrize("name", ["", "doc-", "doc-../../etc/passwd", "../doc-1", "doc-1/../2", "doc-" + "x" * 300])
def test_an_id_of_another_form_is_unknown(store: DocumentStore, name: str):
    assert store.find(name, tenant_of(None)) is None


def test_a_store_in_a_folder_outlives_its_process_and_is_shared(tmp_path: Path):
    one, other = (DocumentStore(FileStorage(tmp_path, PLENTY)) for _ in range(2))
    put = one.put(record())
    one.put_block(put, "key", b"the block")
    assert other.find(put.id, put.tenant) == put
    assert other.block(put, "key") == b"the block" and other.block(put, "another key") is None
    other.delete(put)
    assert DocumentStore(FileStorage(tmp_path, PLENTY)).find(put.id, put.tenant) is None
    assert not list(tmp_path.glob("*.bin"))


def test_a_store_in_memory_keeps_no_block(tmp_path: Path):
    store = DocumentStore(NoStorage())
    assert store.put_block(record(), "key", b"block") is False and store.block(record(), "key") is None


@pytest.mark.parametrize("damage", ["empty", "cut", "longer than it is", "other content", "another document"])
def test_a_record_that_is_not_what_it_claims_to_be_is_a_miss(tmp_path: Path, damage: str):
    put = DocumentStore(FileStorage(tmp_path, PLENTY)).put(record())
    [path] = files(tmp_path, "record")
    whole = path.read_bytes()
    if damage == "another document":
        DocumentStore(FileStorage(tmp_path, PLENTY)).put(record(" Another."))
        [other] = [one for one in files(tmp_path, "record") if one != path]
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(
            {
                "empty": b"", "cut": whole[:-3], "longer than it is": (1 << 60).to_bytes(8, "big") + whole[8:],
                "other content": whole[:8] + b"x" * len(whole[8:]),
            }[damage]
        )  # fmt: skip
    store = DocumentStore(FileStorage(tmp_path, PLENTY))
    assert store.find(put.id, put.tenant) is None
    assert store.broken == (damage in ("other content", "another document"))
    assert store.put(put) == put and DocumentStore(FileStorage(tmp_path, PLENTY)).find(put.id, put.tenant) == put


def test_a_block_that_turned_out_broken_is_counted_and_gone(tmp_path: Path):
    store = DocumentStore(FileStorage(tmp_path, PLENTY))
    put = store.put(record())
    store.put_block(put, "key", b"bad")
    store.drop_block(put, "key")
    assert store.broken == 1 and store.block(put, "key") is None
    assert store.find(put.id, put.tenant) == put
    assert store.put_block(put, "key", b"good") and store.block(put, "key") == b"good"


def test_a_folder_is_kept_to_its_size(tmp_path: Path):
    store = DocumentStore(FileStorage(tmp_path, 20_000))
    put = [store.put(record(f" Fact {number}.")) for number in range(30)]
    for one in put:
        store.put_block(one, "key", bytes(1000))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.bin")) <= 20_000
    held = [one for one in put if store.block(one, "key") is not None]
    assert held and put[-1] in held and put[0] not in held


def test_records_in_memory_are_bounded():
    store = DocumentStore(NoStorage(), record_bytes=2000)
    put = [store.put(record(f" Fact {number}.")) for number in range(100)]
    alive = [one for one in put if store.find(one.id, one.tenant) is not None]
    assert 0 < sum(one.nbytes for one in alive) <= 2000 and put[-1] in alive and put[0] not in alive


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DocumentError, match="cannot be written"):
        FileStorage(tmp_path / "file" / "inside", PLENTY)


def test_novel_shuffles_of_a_fixed_corpus_keep_their_hit_rate(tmp_path: Path):
    """Case 54, the store alone: memory for a third of the corpus before a folder for all of it."""
    rng = random.Random(0)
    store = DocumentStore(FileStorage(tmp_path, PLENTY))
    shelf: SizedLRU[str, bytes] = SizedLRU(4 * 100, len)
    corpus = [store.put(record(f" Fact {number}.")) for number in range(12)]
    rates, hits, asked = [], 0, 0
    for _ in range(200):
        for one in rng.sample(corpus, 5):
            asked += 1
            block = shelf.get(one.id) or store.block(one, "key")
            hits += block is not None
            if block is None:
                block = bytes(100)
                store.put_block(one, "key", block)
            shelf.put(one.id, block)
        rates.append(hits / asked)
    assert min(rates[19:]) >= rates[19] and rates[-1] > 0.98


def test_a_mooncake_store_is_shared_by_all_who_join_it(joined):
    one, other = DocumentStore(joined()), DocumentStore(joined())
    put, block = one.put(record()), bytes(range(256)) * 80_000
    assert one.put_block(put, "key", block) and one.put_block(put, "other model", b"another")
    assert other.find(put.id, put.tenant) == put and other.listed(put.tenant) == [put]
    assert other.block(put, "key") == block and other.block(put, "no model's") is None
    assert one.put_block(put, "key", b"shorter") and other.block(put, "key") == b"shorter"
    other.delete(put)
    assert [one.block(put, key) for key in ("key", "other model")] == [None, None]
    assert DocumentStore(joined()).find(put.id, put.tenant) is None
    assert one.storage_failed == other.storage_failed == 0, "what is absent is no failure"


def test_what_a_full_mooncake_store_does_not_take_is_counted(joined):
    """A block that was just read is leased, and is not driven out for another."""
    store = DocumentStore(joined())
    put = store.put(record())
    kept = [number for number in range(12) if store.put_block(put, str(number), bytes(8 << 20))]
    assert 0 < len(kept) < 12 and store.storage_failed == 12 - len(kept)
    assert store.block(put, str(kept[-1])) == bytes(8 << 20)


def test_without_its_master_a_mooncake_store_holds_nothing_and_says_so(tmp_path: Path, master: StoreMaster):
    own = StoreMaster(tmp_path)
    store = DocumentStore(join(own))
    put = store.put(record())
    assert store.put_block(put, "key", b"block") and store.block(put, "key") == b"block"
    own.stop()
    assert store.block(put, "key") is None and not store.put_block(put, "key", b"again")
    assert store.listed(put.tenant) == [put], "its record is in memory"
    store.delete(put)
    assert store.find(put.id, put.tenant) is None and store.storage_failed >= 4
    with pytest.raises(DocumentError, match=f"127.0.0.1:{own.port} cannot be joined.*refused"):
        join(own)


@pytest.mark.parametrize(
    "url", ["mooncake://", "mooncake://host:port", "mooncake://host/path", "mooncake://host?size=3", "s3://host:1"]
)
def test_what_is_no_mooncake_store_is_refused(url: str):
    with pytest.raises(DocumentError, match="expected mooncake://HOST:PORT"):
        Master.parse(url)


def test_a_masters_ports_have_mooncakes_defaults():
    assert Master.parse("mooncake://host") == Master("host", 50051, 9003)
    assert Master.parse("mooncake://10.0.0.1:5?admin=6") == Master("10.0.0.1", 5, 6)
