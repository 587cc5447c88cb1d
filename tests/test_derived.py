"""Shards kept by reference equal those of a store filled anew, whatever became of the corpus.

The encoder is one whose embedding is a pure function of the text, so that what is to come out is
known to the bit.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.build_helpers import column_facts
from tests.moments_helpers import distance, two_pass
from whiten_index import BuildConfig, encode_corpus
from whiten_index.corpus import CorpusConfig, ParquetCorpus, plan_windows
from whiten_index.pipeline.shard_encoding import ShardResult, ShardWork
from whiten_index.runners import LocalRunner
from whiten_index.store import CorpusRecord, EmbeddingStore, StoreDtype
from whiten_index.store.dedup import RowFinder
from whiten_index.whitening.moments import Moments

DIM, LONGEST, SHARD_ROWS = 6, 20, 8
NAME = "0123456789abcdef" * 2
WORDS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay")


def digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


def embedding(text: str) -> np.ndarray:
    """Return what float16 holds to the bit, so that it does not matter which type rows are in."""
    seed = int.from_bytes(digest(text.encode())[:8], "little")
    rows = np.random.default_rng(seed).standard_normal(DIM) + 0.5
    return rows.astype(np.float16).astype(np.float32)


@dataclass
class FakeEncoder:
    """Remembers what it was asked to encode."""

    encoded: list[str] = field(default_factory=list)
    prepared: list[str] = field(default_factory=list)
    budget: Any = field(default_factory=lambda: SimpleNamespace(halvings=0))
    runtime: Any = field(default_factory=dict)

    def prepare(self, texts: list[str]) -> Any:
        self.prepared += texts
        truncated = np.array([len(text) > LONGEST for text in texts], dtype=np.bool_)
        return SimpleNamespace(texts=texts, tokens=SimpleNamespace(truncated=truncated))

    def run(self, window: Any, *, advance: Callable[[int], None]) -> Any:
        self.encoded += window.texts
        advance(len(window.texts))
        return window

    def collect(self, window: Any) -> Any:
        return SimpleNamespace(
            embeddings=np.array([embedding(text) for text in window.texts]).reshape(-1, DIM),
            truncated=window.tokens.truncated,
            distinct=len(set(window.texts)),
            tokens=0,
            padded_tokens=0,
            moments_of=lambda rows: None,
        )


@dataclass
class Night:
    """What one run over the corpus gave."""

    store: EmbeddingStore
    results: list[ShardResult]
    encoder: FakeEncoder

    @property
    def derived(self) -> list[str]:
        names = [result.part.shard for result in self.results if result.stored is not None]
        return [name for name in names if self.store.shards.picks(name) is not None]


Files = dict[str, list[str]]


def write_texts(folder: Path, files: Files) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, texts in files.items():
        ids = [f"{name}-{i}" for i in range(len(texts))]
        pq.write_table(pa.table({"id": ids, "text": pa.array(texts, pa.string())}), folder / name)
    return folder


def run_night(root: Path, files: Files, *, dtype: StoreDtype = StoreDtype.FLOAT16) -> Night:
    """Read the corpus of that night into the store below ``root``."""
    folder = write_texts(root / "corpus", files)
    config = CorpusConfig(
        sources=(str(folder),), text_columns=("text",), id_column="id", shard_rows=SHARD_ROWS
    )
    corpus, encoder = ParquetCorpus.open(config), FakeEncoder()
    store = EmbeddingStore.create(root / "store", column_facts(DIM), NAME)
    rows = RowFinder(store, store.corpus_shards())
    encoder_of: Any = lambda: encoder  # noqa: E731
    work = ShardWork(corpus, store, encoder_of, dtype, rows=rows)
    windows = plan_windows(corpus.shards, rows=2 * SHARD_ROWS)
    results = [r for window in LocalRunner(work).map(windows) for r in window.shards]
    parts = tuple(result.part for result in results)
    # Only what was the corpus last night is remembered, as in a store that is cared for.
    store.save_corpus(CorpusRecord(config.source_identity(), parts, {}))
    return Night(EmbeddingStore.open(root / "store"), results, encoder)


def texts_by_shard(files: Files) -> Iterator[list[str]]:
    for name in sorted(files):
        for start in range(0, len(files[name]), SHARD_ROWS):
            yield files[name][start : start + SHARD_ROWS]


def assert_moments(found: Moments, rows: np.ndarray, *, within: float) -> None:
    count, mean, scatter = two_pass(rows)
    assert found.count == count
    assert distance(found.mean, mean) <= within
    assert distance(found.scatter, scatter) <= within


def assert_as_new(night: Night, files: Files, dtype: str, *, within: float = 1e-12) -> None:
    """Every shard holds what a store filled anew would, to the bit; moments to ``within``."""
    expected = list(texts_by_shard(files))
    assert len(night.results) == len(expected)
    for result, texts in zip(night.results, expected, strict=True):
        name = result.part.shard
        stored = night.store.require(name)
        # A shard of one row tells no spread, and is kept in float32; so are rows taken from it.
        assert stored.dtype in (dtype, "float32")
        truth = np.array([embedding(text) for text in texts]).astype(stored.dtype)
        assert (stored.rows, stored.bytes) == (len(texts), truth.nbytes)
        found = night.store.embeddings(name)
        assert found.dtype == stored.dtype
        np.testing.assert_array_equal(found, truth)
        mapped = night.store.mapped_embeddings(name)
        assert (len(mapped), mapped.shape, mapped.dtype) == (len(truth), truth.shape, truth.dtype)
        np.testing.assert_array_equal(mapped[1:3], truth[1:3])
        digests = [digest(text.encode()) for text in texts]
        assert night.store.shards.digests(name).tobytes() == b"".join(digests)
        cut = [len(text) > LONGEST for text in texts]
        flags = night.store.shards.truncated(name)
        assert flags is not None
        assert flags.tolist() == cut
        assert stored.truncated == result.part.truncated == sum(cut)
        assert_moments(night.store.moments(name), truth, within=within)
        ids = night.store.documents(result.part).column("id").to_pylist()
        assert len(ids) == len(texts)


def draw_text(rng: np.random.Generator) -> str:
    return " ".join(rng.choice(WORDS, rng.integers(2, 9)))


def draw_files(rng: np.random.Generator) -> Files:
    return {f"{n}.parquet": [draw_text(rng) for _ in range(rng.integers(5, 40))] for n in "abc"}


def edited(files: Files, rng: np.random.Generator) -> Files:
    """Change, delete, insert, repeat and move some rows; now and then a file comes or goes."""
    now = {name: list(texts) for name, texts in files.items()}
    for _ in range(int(rng.integers(1, 7))):
        name = str(rng.choice(sorted(now)))
        texts, kind = now[name], rng.integers(0, 6)
        at = int(rng.integers(0, len(texts)))
        if kind == 0:
            texts[at] = draw_text(rng)
        elif kind == 1 and len(texts) > 3:
            del texts[at : at + int(rng.integers(1, 4))]
        elif kind == 2:
            texts[at:at] = [draw_text(rng) for _ in range(rng.integers(1, 4))]
        elif kind == 3:
            texts.insert(int(rng.integers(0, len(texts))), texts[at])
        elif kind == 4 and len(texts) > 3:
            now[str(rng.choice(sorted(now)))].append(texts.pop(at))
        elif kind == 5:
            rng.shuffle(texts)
    if rng.random() < 0.15:
        now[f"{chr(int(rng.integers(100, 120)))}.parquet"] = [draw_text(rng) for _ in range(9)]
    if rng.random() < 0.1 and len(now) > 1:
        del now[str(rng.choice(sorted(now)))]
    return {name: texts for name, texts in now.items() if texts}


def known_texts(files: Files) -> set[str]:
    return {text for texts in files.values() for text in texts}


def new_rows(files: Files, before: Files) -> int:
    """Rows that have to be encoded: their text was nowhere, in a shard that is not there either."""
    known = known_texts(before)
    there, count = set(map(tuple, texts_by_shard(before))), 0
    for texts in texts_by_shard(files):
        if tuple(texts) not in there:
            there.add(tuple(texts))
            count += sum(text not in known for text in texts)
    return count


@pytest.mark.parametrize("seed", range(6))
def test_a_history_of_changes_leaves_what_a_new_store_would_hold(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    dtype = StoreDtype.FLOAT32 if seed % 2 else StoreDtype.FLOAT16
    files, derived = draw_files(rng), 0
    assert_as_new(run_night(tmp_path, files, dtype=dtype), files, dtype.value)
    for _ in range(6):
        before, files = files, edited(files, rng)
        night = run_night(tmp_path, files, dtype=dtype)
        assert_as_new(night, files, dtype.value)
        encoded = sum(result.encoded for result in night.results)
        assert encoded == new_rows(files, before) == len(night.encoder.encoded)
        assert not any(result.remade for result in night.results)
        derived += len(night.derived)
    assert derived > 6


def test_after_thirty_nights_moments_are_those_of_the_rows(tmp_path: Path) -> None:
    """Each night's moments come of the night before's, so errors would add up."""
    rng = np.random.default_rng(30)
    texts = [draw_text(rng) for _ in range(3 * SHARD_ROWS)]
    for night in range(31):
        if night:
            for at in rng.choice(len(texts), 3, replace=False):
                texts[at] = draw_text(rng)
        files = {"a.parquet": texts}
        done = run_night(tmp_path, files)
    assert len(done.derived) >= 2
    assert_as_new(done, files, "float16", within=1e-9)


# Whether texts were cut


# Damage


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("damage", ["flip", "cut", "no folder", "no manifest"])
def test_what_is_damaged_is_made_anew(tmp_path: Path, seed: int, damage: str) -> None:
    """Whichever shard it is, and whoever picks from it: what comes out is right, and is counted."""
    rng = np.random.default_rng(seed)
    files = {"a.parquet": [draw_text(rng) for _ in range(20)]}
    files["b.parquet"] = [draw_text(rng) for _ in range(20)]
    for _ in range(2):
        night = run_night(tmp_path, files)
        before, files = files, edited(files, rng)
    victim = str(rng.choice([result.part.shard for result in night.results]))
    folder = night.store.shards.folder / victim
    path = folder / "embeddings.safetensors"
    if damage == "flip":
        data = bytearray(path.read_bytes())
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    elif damage == "no folder":
        shutil.rmtree(folder)
    else:
        (folder / "manifest.json").unlink()
    assert EmbeddingStore.open(tmp_path / "store").find(victim) is None
    for corpus in (before, files):
        night = run_night(tmp_path, corpus)
        assert_as_new(night, corpus, "float16")
        if corpus is before:
            remade = [result.part.shard for result in night.results if result.remade]
            assert (victim in remade) == (damage != "no folder")


# Embeddings that are given


def column_night(
    root: Path, rows: list[np.ndarray], width: type, dtype: str | None, *, store: str = "store"
) -> Any:
    array = np.array(rows).astype(width)
    kind = pa.list_(pa.from_numpy_dtype(np.dtype(width)))
    root.mkdir(exist_ok=True)
    pq.write_table(
        pa.table({"id": range(len(rows)), "e": pa.array(list(array), kind)}), root / "c.parquet"
    )
    return encode_corpus(
        BuildConfig(
            corpus=(str(root / "c.parquet"),),
            store=str(root / store),
            embedding_column="e",
            id_column="id",
            store_dtype=dtype,
            shard_rows=SHARD_ROWS,
        )
    )


@pytest.mark.parametrize("dtype", [None, "own", "float32", "float16"])
@pytest.mark.parametrize("width", [np.float16, np.float32, np.float64])
def test_given_embeddings_are_kept_as_in_a_new_store(
    tmp_path: Path, width: type, dtype: str | None
) -> None:
    """Also where a last shard of one row tells no spread, and is kept in float32 for that."""
    rng = np.random.default_rng(5)
    rows = [rng.standard_normal(DIM) for _ in range(3 * SHARD_ROWS + 1)]
    derived = 0
    for night in range(5):
        report = column_night(tmp_path / "c", rows, width, dtype)
        fresh = column_night(tmp_path / f"fresh{night}", rows, width, dtype)
        assert [part.shard for part in report.record.parts] == [
            part.shard for part in fresh.record.parts
        ]
        assert report.record.fingerprint == fresh.record.fingerprint
        for part in report.record.parts:
            ours, theirs = (each.store.embeddings(part.shard) for each in (report, fresh))
            assert ours.dtype == theirs.dtype
            np.testing.assert_array_equal(ours, theirs)
            found, truth = (each.store.require(part.shard) for each in (report, fresh))
            assert found == truth
            assert_moments(report.store.moments(part.shard), theirs, within=1e-12)
            derived += report.store.shards.picks(part.shard) is not None
        rows[int(rng.integers(len(rows)))] = rng.standard_normal(DIM)
        rows.insert(int(rng.integers(len(rows))), rng.standard_normal(DIM))
        del rows[int(rng.integers(len(rows)))]
    assert derived > 3
