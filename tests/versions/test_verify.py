"""Verify: any damage is found and named, and what is said to mend it does."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers.builds import build, random_rows, write_rows
from tests.helpers.corpora import overwrite
from tests.versions.upkeep import SHARD, World, new_world, reseal
from whiten_index.artifacts import manifest
from whiten_index.artifacts.tensors import write_tensors
from whiten_index.errors import ArtifactError
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.compaction import compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.verify import verify_index, verify_store


@pytest.fixture
def world(tmp_path):
    """A world with one of everything: segments, joined and shared ones, notes, an index."""
    world = new_world(tmp_path, *[8] * 5)
    world.corpora["other"] = [world.numbers(40)]
    world.encode("other")
    compact_store(world.place, segment_rows=SHARD)
    world.corpora["other"][0][3] = world.numbers(1)[0]
    other = world.encode("other").record
    world.corpora["news"].append(world.numbers(25))
    world.encode()
    store = world.store
    store.results.save_choice({"a": 1}, {"k": 6})
    store.results.save_sample({"a": 1}, {"x": np.ones((2, 3), dtype=np.float32)})
    world.add_version(world.root / "index", other, 1)
    assert len(world.segment_folders()) == 4
    assert verify_store(world.place).damages == ()
    return world


def mend(world: World) -> None:
    """Do what a remedy says that names corpora, and then gc."""
    for name in world.corpora:
        world.encode(name)
    gc_store(world.place, keep_days=0)


def last_segment(world: World) -> Path:
    """Return the folder of the segment with the last part of the news."""
    return world.store.segments_folder / world.records[-1][0].parts[-1].digests


def test_what_only_a_version_needs_and_what_nothing_needs(world):
    folder, record = last_segment(world), world.records[-1][0]
    world.corpora["news"].pop()
    world.encode()
    overwrite(folder / "embeddings.safetensors", 500, 501)
    version = world.add_version(world.root / "index", record, 2)
    (damage,) = verify_store(world.place).damages
    assert "rows that no corpus has any more can be searched" in damage.remedy
    shutil.rmtree(version)
    (world.root / "index" / "CURRENT").unlink()
    gc_store(world.place, keep_days=0)
    assert verify_store(world.place).sound


@pytest.mark.parametrize(
    "change", ["digests 15", "digests int32", "embeddings 3", "truncated 9", "embeddings NaN"]
)
def test_a_segment_whose_arrays_are_others_is_damaged(world, change):
    folder = last_segment(world)
    tensors, (name, to) = load_file(folder / "embeddings.safetensors"), change.split()
    if to == "NaN":
        tensors[name] = np.where(
            tensors[name] == tensors[name][3, 1], np.float32("nan"), tensors[name]
        )
    elif name == "truncated":
        tensors[name] = tensors[name][: int(to)]
    else:
        tensors[name] = tensors[name].astype(to) if to == "int32" else tensors[name][:, : int(to)]
    write_tensors(folder / "embeddings.safetensors", tensors, kind="segment", version=1)
    fields = json.loads((folder / "manifest.json").read_text())
    fields["files"] = manifest.describe_files(folder)
    del fields["files"]["manifest.json"]
    manifest.write_manifest(folder / "manifest.json", fields)
    (damage,) = verify_store(world.place).damages
    assert ("holds NaN" if to == "NaN" else f"its {name} are") in damage.why
    if to != "NaN":
        with pytest.raises(ArtifactError, match=r"needed rows are in no segment"):
            gc_store(world.place, keep_days=0)
    assert compact_store(world.place, segment_rows=SHARD).damaged == 1
    mend(world)
    assert verify_store(world.place).sound


def test_nothing_is_written_and_no_lock_taken(world):
    def state():
        return {path: path.stat().st_mtime_ns for path in world.root.rglob("*")}

    overwrite(last_segment(world) / "embeddings.safetensors", 500, 501)
    before = state()
    assert not verify_store(world.place).sound
    verify_index(world.root / "index")
    assert state() == before


def test_what_a_job_removes_meanwhile_is_no_damage(world, monkeypatch):
    world.corpora["news"] = [world.numbers(40)]
    world.encode()
    real, done = manifest.check_files, []

    def check_files(folder, fields, *, content, **options):
        if content and not done and folder.parent.name == "segments":
            done.append(gc_store(world.place, keep_days=0))
        return real(folder, fields, content=content, **options)

    monkeypatch.setattr(manifest, "check_files", check_files)
    assert verify_store(world.place).damages == ()
    assert done[0].segments > 0


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    root = tmp_path_factory.mktemp("built")
    rows = random_rows(rows=100)
    for night in range(3):
        write_rows(root / "c.parquet", rows + np.float32(night))
        build(root / "out", str(root / "c.parquet"))
    return root


@pytest.fixture
def out(built, tmp_path):
    shutil.copytree(built, tmp_path / "b")
    return tmp_path / "b" / "out"


def versions_of(out: Path) -> list[Path]:
    return sorted((out / "versions").iterdir())


def test_files_that_are_sound_and_do_not_belong_together(out):
    last = versions_of(out)[-1]
    record = CorpusRecord.load(last / "corpus.json")
    fewer = replace(record, parts=tuple(replace(p, rows=p.rows - 1) for p in record.parts))
    fewer.save(last / "corpus.json")
    reseal(last / "corpus.json")
    (damage,) = verify_index(out).damages
    assert "corpus.json of 99 rows, and the index has 100" in damage.why


def lose_rows(out: Path, version: Path) -> None:
    store = EmbeddingStore.open(out / "store")
    for part in CorpusRecord.load(version / "corpus.json").distinct_parts:
        shutil.rmtree(store.segments_folder / part.digests)


def test_the_store_lacks_rows_of_the_published_version_and_encoding_mends_it(out):
    lose_rows(out, versions_of(out)[-1])
    assert verify_index(out).sound
    (damage,) = verify_store(out / "store").damages
    assert "lacks 100 needed rows" in damage.why
    report = build(out, str(out.parent / "c.parquet"))
    assert report.encoded.counts.encoded == 100
    assert verify_index(out).sound
    assert verify_store(out / "store").sound
