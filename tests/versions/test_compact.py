"""Compaction: fewer segments, and nothing that is read has changed, to the bit."""

import errno
import functools
import shutil
from unittest.mock import Mock

import numpy as np
import pytest
from click.testing import CliRunner

from tests.versions.upkeep import SHARD, World, killed_anywhere, new_world
from whiten_index.artifacts import tensors
from whiten_index.artifacts.atomic import remove_folder
from whiten_index.artifacts.lock import only_writer
from whiten_index.cli import cli
from whiten_index.errors import BusyError, StorageError
from whiten_index.store import segments
from whiten_index.store.segments import Segments
from whiten_index.versions.compaction import compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.verify import verify_store


def compact(world: World, **options):
    """Compact, and then once more, which must do nothing."""
    report = compact_store(world.place, segment_rows=SHARD, **options)
    again = compact_store(world.place, segment_rows=SHARD, **options)
    assert (again.written, again.rows, again.removed) == (0, 0, 0)
    assert again.before == again.after == report.after
    return report


def reads(world: World):
    """Return all that can be read of each part that the last record names."""
    store, (record, _) = world.store, world.records[-1]
    return {
        part.digests: (
            part,
            store.embeddings(part)[:].tobytes(),
            store.digests(part).tobytes(),
            store.moments(part),
        )
        for part in record.distinct_parts
    }


def assert_reads_the_same(before, after):
    assert before.keys() == after.keys()
    for name, (*facts, moments) in before.items():
        assert facts == list(after[name][:-1])
        found = after[name][-1]
        assert found.count == moments.count
        np.testing.assert_allclose(found.mean, moments.mean, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(found.scatter, moments.scatter, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize("spread", [True, False])
def test_what_is_written_night_by_night_is_in_proportion_to_what_changed(tmp_path, spread):
    """One row of 144 a night, the versions of three nights kept."""
    nights, rows, index, kept = 8, 144, tmp_path / "index", []
    world = new_world(tmp_path, *[rows // 4] * 4)
    compact_store(world.place, segment_rows=10 * SHARD)
    written, sizes = 0, []
    for night in range(nights):
        file = world.corpora["news"][night % 4 if spread else 0]
        file[night] = world.numbers(1)[0]
        assert world.encode().counts.encoded == 1
        kept.append(world.add_version(index, world.records[-1][0], night + 1))
        if len(kept) > 3:
            remove_folder(kept.pop(0))
        report = compact_store(world.place, segment_rows=10 * SHARD)
        assert compact_store(world.place, segment_rows=10 * SHARD).written == 0
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


def test_it_may_die_anywhere(tmp_path, monkeypatch):
    world = new_world(tmp_path / "a", *[8] * 3, 20)
    compact(world)
    rng = np.random.default_rng(0)
    for _ in range(2):
        world.change(rng, share=0.4)
        world.encode()
    before = reads(world)
    job = functools.partial(compact_store, segment_rows=SHARD)
    for other in killed_anywhere(world, tmp_path, monkeypatch, job):
        assert_reads_the_same(before, reads(other))
        compact(other)
        assert not list(other.place.rglob(".tmp-*"))
        assert_reads_the_same(before, reads(other))
        gc_store(other.place, keep_days=0)
        assert_reads_the_same(before, reads(other))


def test_a_full_disk_leaves_everything_as_it_was(tmp_path, monkeypatch):
    world = new_world(tmp_path, *[8] * 5)
    before = reads(world)
    full = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as patch:
        patch.setattr(tensors.Path, "write_bytes", full)
        with pytest.raises(StorageError, match="the disk is full"):
            compact_store(world.place, segment_rows=SHARD)
    assert_reads_the_same(before, reads(world))
    assert len(world.segment_folders()) == 5
    assert compact(world).written == 1


def test_what_is_damaged_is_left_alone(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    name = sorted(world.segment_folders())[0]
    path = world.store.segments_folder / name / "embeddings.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    report = compact(world)
    assert (report.rows, report.damaged) == (32, 1)
    ended = CliRunner().invoke(cli, ["compact", str(world.place)])
    assert (ended.exit_code, "whiten-index verify" in ended.stderr) == (5, True)
    assert len(world.segment_folders()) == 2
    assert name in world.segment_folders()
    assert world.encode().counts.encoded == 8
    world.assert_intact()


def test_an_update_under_way_keeps_the_rows_that_no_version_names_yet(tmp_path):
    world, index = new_world(tmp_path, *[8] * 5), tmp_path / "index"
    world.add_version(index, world.records[-1][0], 1)
    before = world.segment_folders()
    with only_writer(index, what="index"), pytest.raises(BusyError, match="is being written"):
        compact_store(world.place, segment_rows=SHARD)
    assert world.segment_folders() == before
    assert compact(world).written == 1


def test_of_a_segment_behind_a_link_the_link_goes(tmp_path):
    world = new_world(tmp_path, *[8] * 5)
    far = shutil.copytree(world.store.segments_folder, tmp_path / "far")
    for folder in far.iterdir():
        shutil.rmtree(world.store.segments_folder / folder.name)
        (world.store.segments_folder / folder.name).symlink_to(folder)
    assert compact(world).removed == 5
    world.assert_intact()
    assert all((folder / "manifest.json").is_file() for folder in far.iterdir())


@pytest.mark.parametrize("read", ["verify", "embeddings"])
def test_segments_joined_while_their_digests_are_read_are_no_damage(tmp_path, monkeypatch, read):
    world = new_world(tmp_path, *[8] * 5)
    compact(world)
    world.corpora["news"] += [world.numbers(8) for _ in range(5)]
    world.encode()
    store, parts, done = world.store, world.records[-1][0].parts, []

    def overtaken(*given):
        if not done:
            done.append(None)
            done.append(compact_store(world.place, segment_rows=SHARD))
        return real(*given)

    room = (Segments, "check_kept") if read == "verify" else (segments, "DigestIndex")
    real = getattr(*room)
    monkeypatch.setattr(*room, overtaken)
    if read == "verify":
        assert verify_store(world.place).damages == ()
    else:
        assert store.embeddings(parts[0]).shape == (8, store.dim)
    assert done[1].removed > 1
