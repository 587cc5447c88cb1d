"""Compaction: fewer folders, and to whoever reads nothing has changed, to the bit."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.bad_input_helpers import run
from tests.build_helpers import column_facts, corpus_source
from tests.corpus_helpers import overwrite
from tests.upkeep_helpers import (
    DIM,
    PACK,
    Crash,
    World,
    add_version,
    dying_at,
    new_world,
    pack_folders,
    shard_folders,
)
from whiten_index.artifacts import tensors
from whiten_index.artifacts.atomic import remove_folder
from whiten_index.artifacts.lock import only_writer
from whiten_index.config import BuildConfig
from whiten_index.encode import EncodeReport, encode_corpus
from whiten_index.errors import ArtifactError, BusyError, ConfigError, StorageError
from whiten_index.moments import Moments
from whiten_index.store import OWN, CorpusPart, CorpusRecord, EmbeddingStore, StoreDtype
from whiten_index.upkeep import compact_store, gc_store, verify_store

NAME = "0123456789abcdef" * 2


def compact(world: World, **options):
    """Compact, and then once more, which must do nothing."""
    report = compact_store(world.place, pack_rows=PACK, **options)
    again = compact_store(world.place, pack_rows=PACK, **options)
    assert (again.packs, again.packed, again.removed) == (0, 0, 0)
    assert again.before == again.after == report.after
    return report


def reads(world: World):
    """Return all that can be read of each shard that the last record names."""
    store, (record, _) = world.store, world.records[-1]
    return {
        name: (
            store.require(name),
            store.embeddings(name).tobytes(),
            store.shards.digests(name).tobytes(),
            store.shards.truncated(name).tolist(),
            store.moments(name),
        )
        for name in record.shards
    }


def assert_reads_the_same(before, after):
    assert before.keys() == after.keys()
    for name, (*facts, moments) in before.items():
        assert facts == list(after[name][:-1])
        found = after[name][-1]
        assert found.count == moments.count
        np.testing.assert_allclose(found.mean, moments.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.scatter, moments.scatter, rtol=1e-12, atol=1e-11)


def test_small_files_become_few_packs(tmp_path):
    world = new_world(tmp_path, *[4] * 25)
    assert len(shard_folders(world)) == 25
    before = reads(world)
    report = compact(world)
    # 25 shards of 4 rows, ten to a pack of 40.
    assert (report.packed, report.rows, report.packs, report.removed) == (25, 100, 3, 25)
    assert (report.before.shards, report.after.shards, report.after.packs) == (25, 0, 3)
    assert shard_folders(world) == set()
    assert_reads_the_same(before, reads(world))
    world.assert_intact()
    assert verify_store(world.place).sound


def test_large_shards_stay_where_they_are(tmp_path):
    world = new_world(tmp_path, 80, 40)
    report = compact(world)
    assert (report.packs, report.after) == (0, report.before)


def test_one_small_shard_alone_stays(tmp_path):
    world = new_world(tmp_path, 43)
    assert compact(world).packs == 0


def test_a_build_after_it_reuses_every_row(tmp_path):
    world = new_world(tmp_path, *[4] * 25)
    compact(world)
    report = world.encode()
    assert (report.counts.encoded, report.counts.reused) == (0, 100)
    assert report.record == world.records[0][0]
    assert shard_folders(world) == set()


@pytest.fixture
def large_rows(monkeypatch):
    """Let folders count for nothing beside the rows, as if these were thousands of bytes each."""
    monkeypatch.setattr("whiten_index.upkeep.packing.WORTH_WRITING", math.inf)


def test_rows_picked_from_what_was_packed_are_found(tmp_path, large_rows):
    world = new_world(tmp_path, *[8] * 5)
    compact(world)
    # Derived shards that pick from members of a pack, and some that pick from these again.
    for _ in range(3):
        for file in world.corpora["news"]:
            file[0] = world.numbers(1)[0]
        assert world.encode().counts.encoded == 5
        world.assert_intact()
    gc_store(world.place, keep_days=0)
    world.assert_intact()
    assert compact(world).packs == 0, "written as a whole each would cost 8 rows for one"
    assert len(shard_folders(world)) == 5
    # Nothing is picked any more.
    world.corpora["news"] = [world.numbers(8) for _ in range(5)]
    world.encode()
    compact(world)
    gc_store(world.place, keep_days=0)
    world.assert_intact()
    assert shard_folders(world) == set()
    assert len(pack_folders(world)) == 1


@pytest.mark.parametrize("spread", [True, False])
def test_what_is_written_night_by_night_is_in_proportion_to_what_changed(
    tmp_path, spread, large_rows
):
    """One row of 144 a night, the versions of three nights kept."""
    nights, rows, index, kept = 20, 144, tmp_path / "index", []
    world = new_world(tmp_path, *[rows // 4] * 4)
    compact_store(world.place, pack_rows=10 * PACK)
    written, sizes = 0, []
    for night in range(nights):
        file = world.corpora["news"][night % 4 if spread else 0]
        file[night] = world.numbers(1)[0]
        assert world.encode().counts.encoded == 1
        kept.append(add_version(world, index, world.records[-1][0], night + 1))
        if len(kept) > 3:
            remove_folder(kept.pop(0))
        report = compact_store(world.place, pack_rows=10 * PACK)
        assert compact_store(world.place, pack_rows=10 * PACK).packs == 0
        written += report.rows
        gc_store(world.place, keep_days=0)
        sizes.append(stored_rows(world))
        world.assert_intact(last=min(3, night + 1))
    assert written <= 2 * nights + rows * (nights // 8)
    assert max(sizes) <= 2 * rows + nights, "at most as much that nothing needs as is needed"
    assert verify_store(world.place).damages == ()


def stored_rows(world: World) -> int:
    """Return how many embeddings the files of a store hold."""
    files = world.place.glob("*/*/*/embeddings.safetensors")
    return sum(len(tensors.map_tensor(path, "embeddings", remedy="")) for path in files)


def test_many_small_files_are_joined(tmp_path):
    world = new_world(tmp_path, *[10] * 200)
    report = compact_store(world.place, pack_rows=10 * PACK)
    assert (report.packed, report.packs) == (200, 5)
    assert shard_folders(world) == set()
    world.assert_intact()


def test_small_files_that_come_night_by_night_are_joined_when_packs_double(tmp_path):
    world, written = new_world(tmp_path, 10), 0
    for night in range(40):
        world.corpora["news"].append(world.numbers(10))
        world.encode()
        report = compact_store(world.place, pack_rows=10 * PACK)
        assert compact_store(world.place, pack_rows=10 * PACK).packs == 0
        written += report.rows
        # Full ones, one at each doubling from 10 rows to half a pack, and one shard alone.
        assert report.after.packs <= (10 * night + 10) // (5 * PACK) + 6
        assert report.after.shards <= 1
    # Of 400 rows each is written again only where the pack it is in doubles.
    assert written <= 400 * 6
    world.assert_intact()


def test_a_pack_is_not_written_again_while_a_version_needs_what_would_go(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    compact(world)
    index = tmp_path / "index"
    version = add_version(world, index, world.records[0][0], 1)
    del world.corpora["news"][:3]
    world.encode()
    assert compact(world).packs == 0
    index.rename(tmp_path / "away")
    with pytest.raises(ArtifactError, match=f"{index}, an index built from .* is not there"):
        compact(world)
    (tmp_path / "away").rename(index)
    remove_folder(version)
    (index / "CURRENT").unlink()
    assert compact(world).rows == 16
    world.assert_intact()


def test_a_whole_shard_that_others_pick_from_may_be_packed(tmp_path):
    world = new_world(tmp_path, 9, 9)
    world.corpora["other"] = [[*world.corpora["news"][0], *world.numbers(6)]]
    derived = world.encode("other").record.parts[0].shard
    assert world.store.shards.picks(derived) is not None
    world.corpora["other"].append(world.numbers(9))
    world.encode("other")
    report = compact(world)
    assert report.packed == 3, "the derived shard, of 15 rows, is no small one"
    assert shard_folders(world) == {derived}
    world.assert_intact()
    (source,) = {each for each in world.store.shards.picks(derived).sources if each != OWN}
    assert source[0] not in shard_folders(world)
    assert verify_store(world.place).sound


def test_the_folder_of_a_packed_shard_stays_for_those_that_pick_what_only_it_holds(tmp_path):
    world = new_world(tmp_path, 8, 8)
    for file in world.corpora["news"]:
        file[0] = world.numbers(1)[0]
    inner, _ = world.encode().record.shards
    # Most of its rows, one that only ``inner`` holds among them, and more that nobody has.
    world.corpora["other"] = [[*world.corpora["news"][0], *world.numbers(5)]]
    outer = world.encode("other").record.parts[0].shard
    assert inner in {name for name, _ in world.store.shards.picks(outer).sources}
    compact(world)
    assert {inner, outer} <= shard_folders(world)
    world.assert_intact(last=2)
    gc_store(world.place, keep_days=0)
    world.assert_intact(last=2)
    assert verify_store(world.place).sound


def wide(root: Path, files: list[np.ndarray]) -> EncodeReport:
    """Encode files of rows (n, d) with as many coordinates as those of a model have."""
    shutil.rmtree(root / "wide", ignore_errors=True)
    (root / "wide").mkdir()
    for number, rows in enumerate(files):
        path = root / "wide" / f"{number:03d}.parquet"
        pq.write_table(pa.table({"id": range(len(rows)), "embedding": list(rows)}), path)
    options = {"embedding_column": "embedding", "store": str(root / "store")}
    return encode_corpus(BuildConfig(corpus=(str(root / "wide"),), **options))


def test_nights_of_a_row_in_each_small_file_leave_the_store_as_large_as_it_was(tmp_path):
    rng = np.random.default_rng(0)
    files = [rng.standard_normal((20, 384)).astype(np.float16) for _ in range(12)]
    wide(tmp_path, files)
    compact_store(tmp_path / "store")
    first = bytes_of(tmp_path / "store")
    assert first < 1.3 * sum(rows.nbytes for rows in files)
    for _ in range(12):
        for rows in files:
            rows[rng.integers(20)] = rng.standard_normal(384)
        report = wide(tmp_path, files)
        assert (report.counts.encoded, report.counts.reused) == (12, 19 * 12)
        # What comes to each file is no more than its new row and what tells where the others lie.
        assert bytes_of(tmp_path / "store") < first + 12 * 5_000
        again = compact_store(tmp_path / "store")
        assert (again.derived, again.alone) == (0, 0)
        gc_store(tmp_path / "store", keep_days=0)
        assert bytes_of(tmp_path / "store") <= 1.02 * first
    found = [report.store.embeddings(name) for name in report.record.shards]
    assert np.array_equal(np.concatenate(found), np.concatenate(files))


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_row_of_many_does_not_have_them_all_written_again(tmp_path):
    """Nor do moments that a pack would hold too count for its folder."""
    rng = np.random.default_rng(0)
    files = [rng.standard_normal((400, 64)).astype(np.float32) for _ in range(2)]
    wide(tmp_path, files)
    assert compact_store(tmp_path / "store").packed == 2
    for rows in files:
        rows[7] = rng.standard_normal(64)
    wide(tmp_path, files)
    report = compact_store(tmp_path / "store")
    assert (report.packed, report.derived, report.alone) == (0, 2, 0)
    said = run("compact", tmp_path / "store")[1]
    assert (
        "\n2 small shards were left as they are: 2 pick most of their rows from others, and to "
        "write these whole would cost more than 4 times what it frees\n"
    ) in said


def test_it_says_that_there_is_nothing_to_join_with(tmp_path):
    world = new_world(tmp_path, 3, 80)
    report = compact(world)
    assert (report.derived, report.alone) == (0, 1)
    world = new_world(tmp_path / "a", 3)
    said = run("compact", world.place)[1]
    assert said.endswith("\n1 small shard was left as it is: 1 has nothing to be joined with yet\n")
    said = json.loads(run("compact", world.place, "--json")[1])
    assert (said["derived"], said["alone"]) == (0, 1)
    assert new_world(tmp_path / "b", *[4] * 25).place.exists()
    report = compact_store(tmp_path / "b" / "store", pack_rows=PACK)
    assert (report.derived, report.alone) == (0, 0)
    assert "left as" not in run("compact", tmp_path / "b" / "store")[1]


def test_a_shard_that_picks_from_many_is_written_as_a_whole(tmp_path):
    world = new_world(tmp_path, 40)
    for night in range(9):
        world.corpora["news"][0][night] = world.numbers(1)[0]
        shard = world.encode().record.parts[0].shard
        sources = {name for name, _ in world.store.shards.picks(shard).sources if name}
        assert len(sources) == night + 1
        if night < 8:
            assert compact(world).packs == 0
    report = compact(world)
    assert (report.packed, report.packs, report.removed) == (1, 1, 1)
    world.assert_intact()
    # What it picked from is needed by nothing now.
    gc_store(world.place, keep_days=0)
    assert (shard_folders(world), len(pack_folders(world))) == (set(), 1)
    world.assert_intact()


def test_a_shard_that_holds_on_to_as_much_as_it_has_is_written_as_a_whole(tmp_path):
    world = new_world(tmp_path, 40)
    for first in (0, 20):
        world.corpora["news"][0][first : first + 19] = world.numbers(19)
        world.encode()
        gc_store(world.place, keep_days=0)
        if not first:
            assert compact(world).packs == 0, "19 rows of 40 are idle"
    assert len(shard_folders(world)) == 3
    assert compact(world).packs == 0, "38 of 40"
    world.corpora["news"][0][19] = world.numbers(1)[0]
    world.corpora["news"][0][39] = world.numbers(1)[0]
    world.encode()
    assert compact(world).packs == 1, "all of the first"
    gc_store(world.place, keep_days=0)
    assert (shard_folders(world), len(pack_folders(world))) == (set(), 1)
    world.assert_intact()


def test_what_is_left_of_a_pack_is_packed_again(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    compact(world)
    (first,) = pack_folders(world)
    del world.corpora["news"][:2]
    world.encode()
    assert compact(world).packs == 0, "24 of 40 rows are needed"
    del world.corpora["news"][0]
    world.encode()
    report = compact(world)
    assert (report.packed, report.rows, report.packs) == (2, 16, 1)
    world.assert_intact()
    gc_store(world.place, keep_days=0)
    (left,) = pack_folders(world)
    assert left != first
    world.assert_intact()


def test_half_empty_packs_are_joined_night_by_night(tmp_path):
    world = new_world(tmp_path, 8, 8)
    compact(world)
    for _ in range(10):
        world.corpora["news"].append(world.numbers(8))
        world.encode()
        compact(world)
        world.assert_intact()
        # Each at least half full, but for one pack and one shard at most.
        rows = sum(map(len, world.corpora["news"]))
        assert len(pack_folders(world)) + len(shard_folders(world)) <= 2 * rows / PACK + 2


@pytest.mark.parametrize("seed", range(8))
def test_nothing_changes_whatever_the_history(tmp_path, seed):
    rng = np.random.default_rng(seed)
    world = new_world(tmp_path, *rng.integers(1, 90, size=4).tolist())
    for _ in range(12):
        world.change(rng, share=float(rng.choice([0.02, 0.2, 0.7])))
        if rng.random() < 0.2:
            world.corpora["news"].append(world.numbers(int(rng.integers(1, 30))))
        world.encode()
        before = reads(world)
        if rng.random() < 0.5:
            compact(world)
            assert_reads_the_same(before, reads(world))
        if rng.random() < 0.5:
            gc_store(world.place, keep_days=0)
        world.assert_intact()
    assert world.encode().counts.encoded == 0
    assert verify_store(world.place).damages == ()


def a_store(path: Path, shards, *, dtype=StoreDtype.OWN):
    """Return a store with these shards in one corpus: embeddings and flags of cut texts."""
    store = EmbeddingStore.create(path, column_facts(4), NAME)
    parts = []
    for number, (embeddings, cut) in enumerate(shards):
        digests = np.random.default_rng(number).integers(0, 256, (len(cut), 16), dtype=np.uint8)
        name = store.shard_fingerprint(digests, dtype)
        store.write(name, digests, embeddings, dtype=dtype, truncated=np.array(cut, dtype=bool))
        parts.append(CorpusPart(name, "0" * 32, len(cut), len(cut), int(sum(cut))))
    store.save_corpus(CorpusRecord(corpus_source(), tuple(parts), {}))
    return store, [part.shard for part in parts]


def test_types_are_kept_apart_and_texts_that_were_cut_are_remembered(tmp_path):
    rng = np.random.default_rng(0)
    shards = [
        (rng.standard_normal((n, DIM)).astype(dtype), rng.random(n) < 0.3)
        for n, dtype in [(3, np.float32), (4, np.float16), (9, np.float16), (5, np.float32)]
    ]
    store, names = a_store(tmp_path, shards)
    moments = [store.moments(name) for name in names]
    report = compact_store(tmp_path, pack_rows=PACK)
    assert (report.packed, report.packs) == (4, 2)
    for reader in (store, EmbeddingStore.open(tmp_path)):
        for (embeddings, cut), name, known in zip(shards, names, moments, strict=True):
            assert reader.require(name).dtype == embeddings.dtype
            np.testing.assert_array_equal(reader.embeddings(name), embeddings)
            np.testing.assert_array_equal(reader.shards.truncated(name), cut)
            assert reader.require(name).truncated == sum(cut)
            if len(embeddings) >= DIM:
                np.testing.assert_array_equal(reader.moments(name).scatter, known.scatter)
            else:
                scatter = Moments.of(embeddings).scatter
                np.testing.assert_allclose(reader.moments(name).scatter, scatter, atol=1e-12)


def test_who_has_the_store_open_goes_on_reading(tmp_path):
    world = new_world(tmp_path, *[8] * 3)
    old, (record, truth) = world.store, world.records[0]
    mapped = [old.mapped_embeddings(name) for name in record.shards]
    for _ in range(3):
        compact(world)
        for number, name in enumerate(record.shards):
            wanted = truth[8 * number : 8 * number + 8]
            np.testing.assert_array_equal(mapped[number][np.arange(8)], wanted)
            # Found anew in a pack, and then in the next, by who knew it in the one before.
            np.testing.assert_array_equal(old.embeddings(name), wanted)
            assert old.require(name).rows == 8
        world.corpora["news"].append(world.numbers(3))
        world.encode()


def test_it_may_die_anywhere(tmp_path, monkeypatch):
    world = new_world(tmp_path / "a", *[8] * 6, 43)
    compact(world)
    rng = np.random.default_rng(0)
    for _ in range(3):
        world.change(rng, share=0.4)
        world.encode()
    before = reads(world)
    step, done = 0, False
    while not done:
        other = World(tmp_path / str(step), dict(world.corpora), list(world.records))
        shutil.copytree(world.root, other.root)
        with monkeypatch.context() as patch:
            dying_at(patch, step)
            with contextlib.suppress(Crash):
                done = compact_store(other.place, pack_rows=PACK).packs > 0
        assert_reads_the_same(before, reads(other))
        compact(other)
        assert not list(other.place.rglob(".tmp-*"))
        assert_reads_the_same(before, reads(other))
        gc_store(other.place, keep_days=0)
        assert_reads_the_same(before, reads(other))
        shutil.rmtree(other.root)
        step += 1
    assert step > 20


def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch):
    world = new_world(tmp_path, *[8] * 5)
    before = reads(world)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(tensors.Path, "write_bytes", full)
        with pytest.raises(StorageError, match="the disk is full"):
            compact_store(world.place, pack_rows=PACK)
    assert_reads_the_same(before, reads(world))
    assert len(shard_folders(world)) == 5
    with monkeypatch.context() as patch:
        patch.setattr("whiten_index.space.free_bytes", lambda _: 10)
        with pytest.raises(StorageError, match=r"compaction needs about .* bytes"):
            compact_store(world.place, pack_rows=PACK)
    assert compact(world).packs == 1


def test_what_is_damaged_is_left_alone(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    name = sorted(shard_folders(world))[0]
    path = world.store.shards.folder / name / "embeddings.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = compact(world)
    assert (report.packed, report.damaged) == (4, 1)
    assert shard_folders(world) == {name}
    assert world.encode().counts.encoded == 8
    world.assert_intact()


def test_a_shard_made_anew_for_a_damaged_pack_is_read_and_not_the_pack(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    compact(world)
    (pack,) = pack_folders(world)
    path = world.store.shards.packs.folder / pack / "embeddings.safetensors"
    overwrite(path, 600, 700)
    report = world.encode()
    assert (report.counts.encoded, report.counts.remade_shards) == (40, 5)
    world.assert_intact()
    # Also by who looks at no checksums: what was written last goes first.
    record, truth = world.records[-1]
    found = np.concatenate([world.store.embeddings(name) for name in record.shards])
    np.testing.assert_array_equal(found, truth)
    gc_store(world.place, keep_days=0)
    assert pack not in pack_folders(world)
    world.assert_intact()
    assert compact(world).packs == 1
    world.assert_intact()


def test_nobody_else_writes_meanwhile(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    with only_writer(world.store.folder, what="it"), pytest.raises(BusyError, match="is being"):
        compact_store(world.place)


def test_what_cannot_be_asked(tmp_path):
    with pytest.raises(ArtifactError, match="holds no store of embeddings"):
        compact_store(tmp_path / "none")
    with pytest.raises(ConfigError, match="pack_rows 0 was given"):
        compact_store(tmp_path, pack_rows=0)


def test_the_command(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    status, out, _ = run("compact", world.place)
    assert status == 0
    assert "5 shards joined in 1 pack, 40 rows" in out
    status, out, _ = run("compact", world.place, "--json")
    assert (status, json.loads(out)["after"]["packs"]) == (0, 1)
