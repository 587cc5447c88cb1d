"""The store against what was put in, whatever happens to its files."""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.bad_input import file_size_limit
from tests.helpers.builds import column_facts
from tests.helpers.flipped import flip
from tests.helpers.moments import make_embeddings, quick, seeds
from whiten_index import EmbeddingStore, Moments, Whitening, WhiteningConfig
from whiten_index.artifacts import limits, manifest
from whiten_index.artifacts.tensors import map_tensor
from whiten_index.errors import ArtifactError, ConfigError, CorpusError, FormatError, StorageError
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.store.records import CorpusPart, CorpusRecord

NAME = "0123456789abcdef" * 2


def make_digests(seed, n):
    return np.random.default_rng(seed).integers(0, 256, (n, 16), dtype=np.uint8)


def new_store(folder, dim=8):
    return EmbeddingStore.create(folder, column_facts(dim, "tiny"), NAME)


@pytest.fixture
def store(tmp_path):
    return new_store(tmp_path / "store")


def write(store, embeddings, *, dtype=StoreDtype.FLOAT16, seed=0, truncated=0):
    digests = make_digests(seed, len(embeddings))
    cut = np.arange(len(embeddings)) < truncated
    return store.write(digests, embeddings, dtype=dtype, truncated=cut)


def segment_files(store, segment):
    """Name -> file of a segment, found without knowing the layout."""
    (folder,) = (p for p in store.folder.rglob(segment.name) if p.is_dir())
    return {path.stem: path for path in folder.iterdir() if path.is_file()}


def test_a_segment_comes_back_as_it_was_kept(store):
    embeddings = make_embeddings(n=70)
    written = write(store, embeddings, truncated=3)
    found = store.segment(written.name)
    assert found == written
    assert (found.rows, found.truncated, found.dtype) == (70, 3, "float16")
    kept = store.tensor(written.name, "embeddings")
    np.testing.assert_array_equal(kept, embeddings.astype(np.float16))
    assert found.bytes == kept.nbytes


@pytest.mark.parametrize("dtype", StoreDtype)
def test_moments_are_those_of_the_rows_as_kept(store, dtype):
    segment = write(store, make_embeddings(ratio=10).astype(np.float64), dtype=dtype)
    kept = Moments.of(store.tensor(segment.name, "embeddings"))
    found = store.segment_moments(segment.name)
    assert found.count == kept.count
    np.testing.assert_array_equal(found.mean, kept.mean)
    np.testing.assert_array_equal(found.scatter, kept.scatter)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_embeddings_that_are_not_finite_leave_no_segment(store, bad):
    embeddings = make_embeddings()
    embeddings[3, 3] = bad
    with pytest.raises(ConfigError, match="NaN or infinity"):
        write(store, embeddings)
    assert not list(store.folder.rglob("*.safetensors"))


def changing(change):
    def damage(path):
        path.write_bytes(change(path.read_bytes()))

    return damage


cut = changing(lambda data: data[:-1])
cut_half = changing(lambda data: data[: len(data) // 2])
empty = changing(lambda data: b"")
lengthen = changing(lambda data: data + b"\0")


FILES = ["embeddings", "moments", "manifest"]


DAMAGES = [
    *((file, how) for file in FILES for how in (cut_half, empty, flip, Path.unlink)),
    # The last byte of a manifest is a line's end: one more or less is no damage.
    *((file, how) for file in FILES[:2] for how in (cut, lengthen)),
]


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_segment_is_not_found_and_writing_it_again_mends_it(store, file, damage):
    embeddings = make_embeddings()
    segment = write(store, embeddings)
    damage(segment_files(store, segment)[file])
    assert store.segment(segment.name) is None
    assert store.mirror.holds(store.segments_folder / segment.name)
    with pytest.raises(ArtifactError, match=r"is missing or damaged; run the same encode"):
        store.require_segment(segment.name)
    assert write(store, embeddings) == segment
    assert store.segment(segment.name) == segment
    kept = store.tensor(segment.name, "embeddings")
    np.testing.assert_array_equal(kept, embeddings.astype(np.float16))


def test_a_comma_that_became_a_point_is_damage(store):
    path = segment_files(store, write(store, make_embeddings()))["embeddings"]
    path.write_bytes(path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[0.', 1))
    with pytest.raises(ArtifactError, match="embeddings"):
        map_tensor(path, "embeddings", remedy="restore it")


@pytest.mark.parametrize("damage", [flip, cut_half])
def test_a_damaged_record_of_a_users_corpus_stays_the_users(store, record_file, damage):
    record = store.corpus()
    damage(record_file)
    store.save_corpus(record, index=store.root / "index")
    store.forget_corpus(record.source, index=store.root / "index")
    assert store.corpus() == record


@pytest.mark.parametrize(("file", "step"), [("embeddings", 3), ("moments", 3), ("manifest", 1)])
def test_no_flipped_bit_goes_unseen(tmp_path, file, step):
    store = new_store(tmp_path, dim=4)
    segment = write(store, make_embeddings(n=6, d=4), truncated=3)
    path = segment_files(store, segment)[file]
    # White space and the like in a manifest may change, as long as what it says does not.
    harmless = (None, segment) if file == "manifest" else (None,)
    for at in range(0, path.stat().st_size, step):
        flip(path, at)
        assert store.segment(segment.name) in harmless, f"byte {at}"
        flip(path, at)
    assert store.segment(segment.name) == segment


@pytest.mark.parametrize(("n", "d"), [(4000, 20), (130, 130)], ids=["embeddings", "moments"])
def test_a_disk_that_takes_no_more_is_an_output_error_and_leaves_nothing(tmp_path, n, d):
    store = new_store(tmp_path, dim=d)
    embeddings = make_embeddings(n=n, d=d)
    with file_size_limit(60_000), pytest.raises(StorageError, match=r"cannot write .*limit"):
        write(store, embeddings)
    assert not list(store.folder.rglob("*.safetensors"))
    segment = write(store, embeddings)  # nothing is in the way when there is room again
    assert store.segment(segment.name) == segment


COLUMNS = {
    "string": (pa.string(), [f"doc-{i} é" for i in range(40)]),
    "int": (pa.int32(), list(range(40))),
    "bool": (pa.bool_(), [i % 3 == 0 for i in range(40)]),
    "nulls": (pa.int64(), [None if i % 5 == 1 else i for i in range(40)]),
    "null strings": (pa.string(), [None if i % 4 == 2 else str(i) for i in range(40)]),
    "lists": (pa.list_(pa.int16()), [list(range(i % 4)) for i in range(40)]),
    "structs": (pa.struct({"a": pa.int8()}), [{"a": i} for i in range(40)]),
    "times": (pa.timestamp("us", "UTC"), list(range(40))),
}


def as_part(name, rows):
    return CorpusPart("0" * 32, name, rows, rows, 0, 0)


@pytest.mark.parametrize("column", COLUMNS)
def test_documents_come_back_as_they_were(store, column):
    kind, values = COLUMNS[column]
    table = pa.table({"id": pa.array(range(40)), column: pa.array(values, kind)})
    found = store.documents(as_part(store.write_documents(table), 40))
    assert found.schema.equals(table.schema)
    assert found.to_pylist() == table.to_pylist()


ROWS = pa.table({"id": [str(n) for n in range(40)], "title": ["a"] * 40})
UNFIT = {
    "fewer rows": ROWS.slice(1),
    "no ids": ROWS.drop_columns(["id"]),
    "a column twice": ROWS.append_column("title", ROWS["title"]),
    "ids that are lists": ROWS.set_column(0, "id", [[[1]] * 40]),
    "texts that are not UTF-8": ROWS.set_column(1, "title", pa.array([b"\xff"] * 40).view("utf8")),
}


@pytest.mark.parametrize("name", UNFIT)
def test_documents_that_do_not_fit_are_damage(store, name):
    with pytest.raises(ArtifactError, match=r"is damaged|cannot be read"):
        store.documents(as_part(store.write_documents(UNFIT[name]), 40))


def test_a_part_beyond_the_limit_of_readers_is_not_written(store, monkeypatch):
    monkeypatch.setattr(limits, "_EXPANDED_BYTES", 1 << 20)
    repeated = pa.table({"id": range(17), "body": ["x" * (1 << 16)] * 17})
    with pytest.raises(CorpusError, match="use a smaller --shard-rows, or --keep fewer columns"):
        store.write_documents(repeated)
    assert not [*store.folder.rglob("*.zst")]


@pytest.mark.parametrize("data", [b"", b"no table"])
def test_what_is_no_table_is_damage(store, data):
    name = hashlib.blake2b(data, digest_size=16).hexdigest()
    (store.folder / "rows" / f"{name}.zst").write_bytes(pa.compress(data, "zstd", asbytes=True))
    with pytest.raises(ArtifactError, match=f"{name}.zst cannot be read"):
        store.documents(as_part(name, 40))


def test_a_part_that_unpacks_to_gibibytes_is_damage(store):
    frame, digest = bytes(1 << 26), hashlib.blake2b(digest_size=16)
    for _ in range(17):
        digest.update(frame)
    packed = 17 * pa.compress(frame, "zstd", asbytes=True)
    (store.folder / "rows" / f"{digest.hexdigest()}.zst").write_bytes(packed)
    with pytest.raises(ArtifactError, match="is missing or damaged"):
        store.documents(as_part(digest.hexdigest(), 40))


@pytest.mark.parametrize("size", [0, 15, 39 * 16])
def test_digests_that_do_not_fit_are_damage(store, size):
    name = store.write_digests(np.zeros(size, dtype=np.uint8))
    with pytest.raises(ArtifactError, match=f"{name}.zst is damaged"):
        store.digests(replace(as_part("0" * 32, 40), digests=name))


@pytest.fixture
def record_file(store):
    source = {"sources": ["a.parquet"], "text_columns": ["text"]}
    source |= dict.fromkeys(("embedding_column", "row_filter", "limit"))
    parts = (CorpusPart(f"{i:032x}", f"{i + 7:032x}", 10 * i, 11 * i, i, 0) for i in range(3))
    store.save_corpus(CorpusRecord(source, tuple(parts), {"empty": 4}))
    (path,) = store.folder.rglob("corpora/*.json")
    return path


UNREADABLE = r"corpora.*json of a whiten-index corpus cannot be read .*; restore it"
NO_OBJECT = r"corpora.*json is damaged: it is of a whiten-index corpus, .* no JSON .*; restore it"
NO_KIND = r"json holds a folder of unknown kind, not a corpus; check the path"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("", UNREADABLE), ("{", UNREADABLE), ("[]", NO_OBJECT), ("{}", NO_KIND)),
        *((text, NO_KIND) for text in ('{"parts": [{"rows": 3}]}', '{"parts": 1}')),
    ],
)
def test_a_damaged_record_is_an_error(store, record_file, text, message):
    record_file.write_text(text)
    with pytest.raises(ArtifactError, match=message):
        store.corpus()


@pytest.mark.parametrize("damage", [empty, cut_half, flip])
def test_a_damaged_store_manifest_is_an_error_and_encoding_again_mends_it(store, damage):
    segment = write(store, make_embeddings())
    damage(store.folder / manifest.MANIFEST)
    with pytest.raises(ArtifactError, match=r"manifest\.json.*(cannot be read|damaged).*; restore"):
        EmbeddingStore.open(store.root)
    new_store(store.root)
    assert EmbeddingStore.open(store.root).segment(segment.name) == segment


def test_a_store_of_a_later_release_is_refused_and_left_alone(store):
    path = store.folder / manifest.MANIFEST
    manifest.write_manifest(path, manifest.read_json(path, what="it") | {"format_version": 99})
    before = path.read_bytes()
    with pytest.raises(FormatError, match=r"store format 99.*upgrade"):
        EmbeddingStore.open(store.root)
    with pytest.raises(FormatError, match=r"store format 99.*upgrade"):
        new_store(store.root)
    assert path.read_bytes() == before


def cosines(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def with_coordinate(change):
    embeddings = make_embeddings(n=500)
    change(embeddings)
    return embeddings


@pytest.mark.parametrize(
    "embeddings",
    [
        np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32) + 100,
        with_coordinate(lambda x: np.add(x[:, 3], 300, out=x[:, 3])),
        *(with_coordinate(lambda x, v=v: x[7].fill(v)) for v in (1e5, -1e5, 65520.0)),
        make_embeddings() * np.float32(1e-7),
    ],
    ids=["mean", "mean of one coordinate", "high", "low", "just too high", "vanishing"],
)
@pytest.mark.filterwarnings("error")
def test_what_float16_cannot_hold_is_kept_as_float32(embeddings):
    kept = as_kept(embeddings, StoreDtype.FLOAT16)
    assert kept.dtype == np.float32
    np.testing.assert_array_equal(kept, embeddings)


@quick
@given(
    seed=seeds,
    n=st.integers(1, 80),
    d=st.integers(16, 40),
    ratio=st.sampled_from([0, 1, 5, 20, 100]),
    span=st.sampled_from([0, 1, 3]),
)
def test_kept_rows_point_where_they_pointed(seed, n, d, ratio, span):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-span, span / 2, d)
    rows = (scale * (rng.normal(size=(n, d)) + ratio)).astype(np.float32)
    kept = as_kept(rows, StoreDtype.FLOAT16).astype(np.float64)
    assert cosines(kept, rows).min() >= 0.99999
    if n > 1:
        # Scaled to one spread, so that small coordinates count as much as large ones.
        mean, spread = rows.mean(axis=0, dtype=float), rows.std(axis=0, dtype=float)
        assert cosines((kept - mean) / spread, (rows - mean) / spread).mean() >= 0.99999


@pytest.mark.parametrize("condition", [10, 1e3])
def test_whitened_rows_point_where_they_pointed(condition):
    # Correlated coordinates: the least direction is far below the spread of any coordinate.
    rng = np.random.default_rng(0)
    rotation, _ = np.linalg.qr(rng.normal(size=(24, 24)))
    rows = rng.normal(size=(500, 24)) * np.geomspace(1, condition**-0.5, 24) @ rotation.T
    rows = rows.astype(np.float32)
    kept = as_kept(rows, StoreDtype.FLOAT16)
    whitening = Whitening.fit(Moments.of(kept), WhiteningConfig(k="full"))
    assert cosines(whitening.apply(kept), whitening.apply(rows)).mean() >= 0.99999
