"""Of several copies of a shard a sound one is chosen, and everything is read from that."""

from __future__ import annotations

import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.corpus_helpers import overwrite
from tests.upkeep_helpers import PACK, World, new_world, pack_folders, shard_folders
from whiten_index.store import EmbeddingStore
from whiten_index.versions.compaction import _to_pack, compact_store
from whiten_index.versions.gc import gc_store
from whiten_index.versions.verify_store import verify_store

TENSORS = "embeddings.safetensors"


@dataclass
class Copies:
    """A world of which some shards lie in two places: the paths of both, the older first."""

    world: World
    paths: tuple[Path, Path]

    def damage(self, number: int) -> Path:
        path = self.paths[number]
        # Bits of numbers alone, so that nothing but a checksum shows it.
        overwrite(path / TENSORS, -40 % (path / TENSORS).stat().st_size, -20)
        data = bytearray((path / TENSORS).read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        data[start + 2 : start + 400 : 4] = bytes(x ^ 1 for x in data[start + 2 : start + 400 : 4])
        (path / TENSORS).write_bytes(data)
        return path


def whole_folder_and_pack(root: Path) -> Copies:
    """A process died after it had packed shards, before it removed their folders."""
    world = new_world(root, *[8] * 5)
    derive_from(world)
    name = world.records[0][0].parts[0].shard
    pack = packed_beside_folders(world)
    return Copies(world, (world.store.shards.folder / name, pack))


def packed_beside_folders(world: World) -> Path:
    """Compact, and bring back the folders that were removed; return the one pack."""
    folder, before = world.store.shards.folder, shard_folders(world)
    shutil.copytree(folder, world.root / "aside")
    compact_store(world.place, pack_rows=PACK)
    (pack,), gone = pack_folders(world), before - shard_folders(world)
    assert gone
    for name in gone:
        shutil.move(world.root / "aside" / name, folder / name)
    return world.store.shards.packs.folder / pack


def two_packs(root: Path) -> Copies:
    """Or after it had packed them anew, before it removed the pack they were in."""
    world = new_world(root, *[8] * 5)
    derive_from(world)
    compact_store(world.place, pack_rows=PACK)
    packs = world.store.shards.packs
    (old,) = packs.names()
    members = packs.fields(old, verify=True)["members"]
    packs.write(packs.next_name(), [_to_pack(world.store, each.fingerprint) for each in members])
    (_, new) = packs.names()
    return Copies(world, (packs.folder / old, packs.folder / new))


def derived_folder_and_pack(root: Path) -> Copies:
    """A derived shard was packed, and its folder stays for who picks the rows it holds."""
    world = new_world(root, 8, 8)
    for file in world.corpora["news"]:
        file[0] = world.numbers(1)[0]
    inner, _ = world.encode().record.shards
    world.corpora["other"] = [[*world.corpora["news"][0], *world.numbers(5)]]
    world.encode("other")
    packs = world.store.shards.packs
    packs.write(packs.next_name(), [_to_pack(world.store, inner)])
    (pack,) = packs.names()
    return Copies(world, (world.store.shards.folder / inner, packs.folder / pack))


def derive_from(world: World) -> None:
    """Keep a corpus of one shard that is derived of those of the first, and too large to pack."""
    rows = [n for file in world.corpora["news"][:2] for n in file]
    world.corpora["other"] = [[*rows, *world.numbers(10)]]
    world.encode("other")
    assert world.store.shards.picks(world.records[-1][0].parts[0].shard) is not None


MADE = [whole_folder_and_pack, two_packs, derived_folder_and_pack]
# What nothing else holds is lost with its only copy, and nothing else is.
LOST = {(derived_folder_and_pack, 0): "other"}


def reads(store: EmbeddingStore, world: World, *, but: str | None) -> None:
    """Everything reads as it must, in one store object that was asked to verify first."""
    for record, truth in world.records[-2:]:
        name = Path(record.source["sources"][0]).name
        start = 0
        for part in record.parts:
            expected = truth[start : start + part.rows]
            start += part.rows
            if name == but:
                assert store.find(part.shard) is None
                continue
            assert store.find(part.shard) is not None
            for _ in range(2):
                np.testing.assert_array_equal(store.embeddings(part.shard), expected)
                mapped = store.mapped_embeddings(part.shard)
                np.testing.assert_array_equal(mapped[np.arange(part.rows)], expected)
            np.testing.assert_allclose(
                store.moments(part.shard).mean, expected.mean(axis=0, dtype=np.float64), atol=1e-12
            )
            assert len(np.unique(store.shards.digests(part.shard), axis=0)) == part.rows
            assert not store.shards.truncated(part.shard).any()
            known = store.shards.known_rows([part.shard], dtypes=["float32"])
            found = known.find(store.shards.digests(part.shard))
            picks = store.shards.picks_of(known, found)
            picked = store.shards.picked(picks, np.empty((0, expected.shape[1]), np.float32))
            np.testing.assert_array_equal(picked[np.arange(part.rows)], expected)


@pytest.mark.parametrize("number", [0, 1], ids=["older", "newer"])
@pytest.mark.parametrize("made", MADE)
def test_what_is_found_sound_is_what_is_read(tmp_path, made, number):
    copies = made(tmp_path)
    copies.damage(number)
    reads(copies.world.store, copies.world, but=LOST.get((made, number)))


@pytest.mark.parametrize("number", [0, 1], ids=["older", "newer"])
@pytest.mark.parametrize("made", MADE)
def test_a_damaged_copy_is_told_and_what_is_said_mends_it(tmp_path, made, number):
    copies = made(tmp_path)
    world, path = copies.world, copies.damage(number)
    (damage,) = verify_store(world.place).damages
    assert damage.path == str(path)
    lost = LOST.get((made, number))
    gc = f"whiten-index gc {world.place} --keep-days 0"
    if lost is None:
        sound = f"all of it is read from sound copies in the store: run {gc}"
        assert (damage.touches, damage.remedy) == ((), sound)
    else:
        assert damage.touches == (f"corpus {world.root / lost}",)
        assert damage.remedy.endswith(f"what is still reported then goes with {gc}")
        assert world.encode(lost).counts.encoded > 0
    gc_store(world.place, keep_days=0)
    assert verify_store(world.place).damages == ()
    assert not path.exists()
    world.assert_intact(last=2)


def test_one_thread_finds_shards_while_another_keeps_new_ones(tmp_path, monkeypatch):
    """As where a corpus is read and encoded at once: each shard that is kept is looked at anew."""
    world = new_world(tmp_path, 8)
    places, name = world.store.shards.places, world.records[0][0].parts[0].shard
    found = places.find(name, verify=True)
    monkeypatch.setattr(places, "_first", lambda *_, **__: found)
    for number in range(10_000):
        places.find(f"before-{number}", verify=True)
    stop = threading.Event()

    def find() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            places.find(f"meanwhile-{number}", verify=True)

    thread, interval = threading.Thread(target=find), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        for number in range(100):
            places.forget(f"kept-{number}")
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
