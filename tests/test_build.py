"""The published index against numpy: closed-form whitening in float64, then brute-force cosine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

import whiten_index
from whiten_index import BuildConfig, build_index, encode_corpus, open_index
from whiten_index.build import BuildReport
from whiten_index.errors import BusyError, ConfigError
from whiten_index.moments import Moments
from whiten_index.whitening import Whitening

Array = NDArray[np.float64]
DIM, ROWS, TOP = 12, 400, 10


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


def random_rows(
    seed: int = 0, *, rows: int = ROWS, dim: int = DIM, mean: float = 0.0
) -> NDArray[np.float32]:
    """Correlated rows with spreads from 0.5 to 2 around a mean."""
    random = np.random.default_rng(seed)
    mixing = np.linalg.qr(random.standard_normal((dim, dim)))[0]
    rows_ = (random.standard_normal((rows, dim)) * np.linspace(0.5, 2, dim)) @ mixing
    return (rows_ + mean * random.choice([-1, 1], dim)).astype(np.float32)


def write_rows(path: Path, embeddings: NDArray[Any], **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns.setdefault("id", np.arange(len(embeddings)))
    pq.write_table(pa.table({**columns, "embedding": list(embeddings)}), path)
    return str(path)


def build(out: Path, *corpus: str, **options: Any) -> BuildReport:
    options = {
        "embedding_column": "embedding",
        "id_column": "id",
        "k": 6,
        "whiten": "whitening",
        **options,
    }
    return build_index(BuildConfig(corpus=corpus, out=str(out), **options))


def closed_form(
    rows: NDArray[Any],
    *,
    k: int,
    exponent: float = 1.0,
    center: bool = True,
    normalize_input: bool = False,
    fitted_on: NDArray[Any] | None = None,
) -> Array:
    """Return (x − μ) U[:, :k] Λ[:k]^(−γ/2), from numpy's own covariance and eigh."""

    def prepared(x: NDArray[Any]) -> Array:
        x = np.asarray(x, dtype=np.float64)
        return x / np.linalg.norm(x, axis=1, keepdims=True) if normalize_input else x

    sample = prepared(rows if fitted_on is None else fitted_on)
    values, vectors = np.linalg.eigh(np.cov(sample.T))
    values, vectors = values[::-1][:k], vectors[:, ::-1][:, :k]
    return (prepared(rows) - (sample.mean(axis=0) if center else 0)) @ (
        vectors * values ** (-exponent / 2)
    )


def cosines(queries: Array, documents: Array) -> Array:
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, documents)]
    return np.asarray(unit[0] @ unit[1].T)


def assert_ranked_by(hits: Sequence[Any], expected: Array, *, tolerance: float = 1e-5) -> None:
    """The hits are the best rows by ``expected`` (n,), in order, with those very scores."""
    order = np.argsort(-expected)[: len(hits)]
    assert [hit.row for hit in hits] == order.tolist()
    np.testing.assert_allclose([hit.score for hit in hits], expected[order], atol=tolerance)


def index_file(out: Path) -> str:
    current = json.loads((out / "CURRENT").read_text())["version"]
    return str(out / "versions" / current / "index.faiss")


TRANSFORMS = [
    pytest.param({"whiten": "whitening"}, {"exponent": 1.0}, id="whitening"),
    pytest.param({"whiten": "pca"}, {"exponent": 0.0}, id="pca"),
    pytest.param({"exponent": 0.5}, {"exponent": 0.5}, id="soft"),
    pytest.param({"center": False}, {"center": False}, id="no-center"),
    pytest.param({"normalize_input": True}, {"normalize_input": True}, id="normalize-input"),
]


@pytest.mark.parametrize(("options", "formula"), TRANSFORMS)
def test_the_index_is_the_closed_form_and_brute_force(
    tmp_path: Path, options: dict[str, Any], formula: dict[str, Any]
) -> None:
    rows, queries = random_rows(1, mean=1.0), random_rows(2, rows=20, mean=1.0)
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), **options)
    expected = cosines(
        closed_form(queries, k=6, fitted_on=rows, **formula), closed_form(rows, k=6, **formula)
    )
    found = open_index(tmp_path / "out").search_embeddings(queries, top_k=TOP)
    for hits, row in zip(found, expected, strict=True):
        assert len(hits) == TOP
        assert_ranked_by(hits, row)


@pytest.mark.parametrize("whiten", ["whitening", "pca"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_mean_100_times_the_spread_costs_nothing(
    tmp_path: Path, whiten: str, dtype: type[np.floating]
) -> None:
    rows = random_rows(3, mean=100.0).astype(dtype)
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), whiten=whiten)
    expected = closed_form(rows, k=6, exponent=float(whiten == "whitening"))
    found = open_index(tmp_path / "out").search_embeddings(rows[:20], top_k=TOP)
    for hits, row in zip(found, cosines(expected[:20], expected), strict=True):
        assert_ranked_by(hits, row, tolerance=2e-5)


def test_whiten_none_ranks_by_the_cosine_of_the_raw_embeddings(tmp_path: Path) -> None:
    rows, queries = random_rows(4, mean=1.0), random_rows(5, rows=20, mean=1.0)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    report = build(tmp_path / "out", corpus, whiten="none", k=None)
    assert report.manifest["whitening"]["k"] == DIM
    found = open_index(tmp_path / "out").search_embeddings(queries, top_k=TOP)
    for hits, row in zip(found, cosines(queries.astype(float), rows.astype(float)), strict=True):
        assert_ranked_by(hits, row)


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_vectors_before_the_norm_have_covariance_one(tmp_path: Path, mean: float) -> None:
    rows = random_rows(6, mean=mean)
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), k="full")
    transform = Whitening.load(
        Path(index_file(tmp_path / "out")).with_name("whitening.safetensors")
    )
    vectors = transform.apply(rows)
    np.testing.assert_allclose(np.cov(vectors.T), np.eye(DIM), atol=1e-6)
    # The file holds these vectors, each of length one, in the order of the corpus.
    chain = faiss.read_index(index_file(tmp_path / "out"))
    inner = faiss.downcast_index(chain.index)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(inner.reconstruct_n(0, ROWS), unit, atol=2e-5)


def test_published_moments_are_those_of_the_corpus(tmp_path: Path) -> None:
    rows = random_rows(7, mean=5.0)
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), shard_rows=37)
    path = Path(index_file(tmp_path / "out")).with_name("moments.safetensors")
    moments = Moments.load(path)
    assert moments.count == ROWS
    np.testing.assert_allclose(moments.mean, rows.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(moments.covariance(), np.cov(rows.T.astype(float)), rtol=1e-9)


@pytest.mark.parametrize(
    ("factory", "code_bytes"),
    [("Flat", 24), ("HNSW16", 24), ("IVF4,Flat", 24), ("PQ3x4", 2), ("SQ8", 6), ("HNSW16,SQ8", 6)],
)
def test_plain_faiss_answers_raw_embeddings_alike(
    tmp_path: Path, factory: str, code_bytes: int
) -> None:
    rows, queries = random_rows(8, mean=3.0), random_rows(9, rows=25, mean=3.0)
    report = build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), factory=factory)
    assert report.manifest["bytes"]["vectors"] == ROWS * code_bytes
    scores, labels = faiss.read_index(index_file(tmp_path / "out")).search(queries, TOP)
    found = open_index(tmp_path / "out").search_embeddings(queries, top_k=TOP)
    assert [[hit.row for hit in hits] for hits in found] == [
        [label for label in row if label >= 0] for row in labels.tolist()
    ]
    for hits, row in zip(found, scores, strict=True):
        np.testing.assert_allclose([hit.score for hit in hits], row[: len(hits)], atol=1e-6)
    exact = cosines(closed_form(queries, k=6, fitted_on=rows), closed_form(rows, k=6))
    best = np.argsort(-exact, axis=1)[:, :TOP]
    overlap = np.mean([np.isin(labels[i], best[i]).mean() for i in range(len(queries))])
    assert overlap > (0.95 if factory in ("Flat", "HNSW16", "SQ8") else 0.4)


def test_a_row_of_zeros_gets_a_score_and_no_nan(tmp_path: Path) -> None:
    rows = random_rows(10)
    rows[7] = 0
    build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), whiten="none", k=None)
    hits = open_index(tmp_path / "out").search_embeddings(rows[:1], top_k=ROWS)[0]
    assert len(hits) == ROWS
    assert next(hit.score for hit in hits if hit.id == 7) == 0


@pytest.mark.parametrize("k", ["full", 1, 0.5, "0.9", None])
def test_k_is_a_number_a_share_of_variance_full_or_a_default(tmp_path: Path, k: Any) -> None:
    rows = random_rows(11)
    report = build(tmp_path / "out", write_rows(tmp_path / "c.parquet", rows), k=k)
    kept = report.manifest["whitening"]["k"]
    eigenvalues = np.linalg.eigvalsh(np.cov(rows.T.astype(float)))[::-1]
    shares = np.cumsum(eigenvalues) / eigenvalues.sum()
    if k in (0.5, "0.9"):
        assert shares[kept - 1] >= float(k)
        assert kept == 1 or shares[kept - 2] < float(k)
    else:
        assert kept == {"full": DIM, 1: 1, None: DIM // 3}[k]
    assert report.manifest["whitening"]["variance_kept"] == pytest.approx(shares[kept - 1])
    condition = report.manifest["whitening"]["condition_number"]
    assert condition == pytest.approx(eigenvalues[0] / eigenvalues[-1])


def test_shards_change_nothing_but_the_unit_of_work(tmp_path: Path) -> None:
    rows = random_rows(12, mean=2.0)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    for shard_rows in (7, 10_000):
        build(tmp_path / str(shard_rows), corpus, shard_rows=shard_rows)
    small, large = (open_index(tmp_path / name) for name in ("7", "10000"))
    for one, other in zip(
        small.search_embeddings(rows[:20]), large.search_embeddings(rows[:20]), strict=True
    ):
        assert [hit.id for hit in one] == [hit.id for hit in other]
        np.testing.assert_allclose([h.score for h in one], [h.score for h in other], atol=1e-6)


@pytest.mark.parametrize("list_type", ["list", "large_list", "fixed"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_kind_of_embedding_column_gives_the_same_index(
    tmp_path: Path, list_type: str, dtype: type[np.floating]
) -> None:
    rows = random_rows(13, rows=60, dim=4).astype(np.float16).astype(dtype)
    values = pa.array(rows.ravel())
    kind = {
        "list": pa.list_(values.type),
        "large_list": pa.large_list(values.type),
        "fixed": pa.list_(values.type, 4),
    }[list_type]
    column = pa.FixedSizeListArray.from_arrays(values, 4).cast(kind)
    pq.write_table(pa.table({"id": range(60), "embedding": column}), tmp_path / "c.parquet")
    report = build(tmp_path / "out", str(tmp_path / "c.parquet"), k=3)
    assert report.manifest["bytes"]["raw"] == rows.nbytes
    found = open_index(tmp_path / "out").search_embeddings(rows[:5], top_k=5)
    expected = closed_form(rows, k=3)
    for hits, row in zip(found, cosines(expected[:5], expected), strict=True):
        assert_ranked_by(hits, row)


def test_ids_and_kept_columns_come_back_with_their_types(tmp_path: Path) -> None:
    rows = random_rows(14, rows=30)
    names = [f"ä{i}" for i in range(30)]
    corpus = write_rows(tmp_path / "c.parquet", rows, id=names, year=range(30), tags=[["x"]] * 30)
    build(tmp_path / "out", corpus, keep=("year", "tags"), shard_rows=7)
    for row, hits in enumerate(open_index(tmp_path / "out").search_embeddings(rows, top_k=1)):
        assert (hits[0].id, dict(hits[0].columns)) == (f"ä{row}", {"year": row, "tags": ["x"]})


def test_without_an_id_column_a_row_is_named_by_file_and_place(tmp_path: Path) -> None:
    rows = random_rows(15, rows=40)
    for part in range(2):
        table = pa.table({"embedding": list(rows[part * 20 : part * 20 + 20])})
        path = tmp_path / "corpus" / f"part-{part}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(table, path, row_group_size=8)
    build(tmp_path / "out", str(tmp_path / "corpus"), id_column=None)
    ids = [hits[0].id for hits in open_index(tmp_path / "out").search_embeddings(rows, top_k=1)]
    assert len(set(ids)) == 40
    assert ids[29] == "part-1.parquet#1:1"
    # A limit drops rows and renames none.
    build(tmp_path / "less", str(tmp_path / "corpus"), id_column=None, limit=30)
    found = open_index(tmp_path / "less").search_embeddings(rows[:30], top_k=1)
    assert [hits[0].id for hits in found] == ids[:30]


def test_a_second_build_is_up_to_date_and_another_k_is_a_new_version(tmp_path: Path) -> None:
    rows = random_rows(16)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    out = tmp_path / "out"
    first = build(out, corpus)
    before = Path(index_file(out)).read_bytes()
    again = build(out, corpus)
    assert (first.up_to_date, again.up_to_date) == (False, True)
    assert again.version == first.version
    other = build(out, corpus, k=4)
    assert other.version != first.version
    assert not other.up_to_date
    assert other.encoded.counts.encoded == 0
    assert open_index(out).bundle.whitening.k == 4
    assert (out / "versions" / first.version / "index.faiss").read_bytes() == before
    # The old choice again: its version is still whole, so it is taken up and not made anew.
    back = build(out, corpus)
    assert back.version == first.version
    assert open_index(out).bundle.whitening.k == 6


@pytest.mark.parametrize(
    "change",
    [
        {"k": 5},
        {"exponent": 0.5},
        {"whiten": "pca"},
        {"center": False},
        {"normalize_input": True},
        {"factory": "SQ8"},
        {"keep": ("year",)},
        {"id_column": None},
        {"limit": 50},
        {"store_dtype": "float16"},
    ],
    ids=str,
)
def test_whatever_changes_the_index_makes_a_new_version(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    rows = random_rows(17, rows=100)
    corpus = write_rows(tmp_path / "c.parquet", rows, year=np.arange(100))
    out = tmp_path / "out"
    first = build(out, corpus)
    changed = build(out, corpus, **change)
    assert changed.version != first.version
    assert not changed.up_to_date
    assert len(open_index(out)) == changed.encoded.record.rows


def test_two_indexes_may_share_a_store(tmp_path: Path) -> None:
    rows = random_rows(18)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    build(tmp_path / "a", corpus, store=str(tmp_path / "store"))
    second = build(tmp_path / "b", corpus, store=str(tmp_path / "store"), k=3)
    assert second.encoded.counts.encoded == 0
    assert second.encoded.counts.reused == ROWS
    assert not (tmp_path / "b" / "store").exists()


def test_counts_add_up(tmp_path: Path) -> None:
    random = np.random.default_rng(19)
    embeddings: list[Any] = list(random.standard_normal((50, 4)))
    embeddings[3] = None
    embeddings[4] = [1.0, np.nan, 0.0, 0.0]
    embeddings[5] = [1.0, 2.0]
    embeddings[6] = []
    ids = pa.array([None if i == 9 else i for i in range(50)])
    table = pa.table({"id": ids, "embedding": embeddings, "lang": ["en", "de"] * 25})
    pq.write_table(table, tmp_path / "c.parquet", row_group_size=20)
    options = {"k": 2, "on_bad_row": "skip", "row_filter": "lang == 'en'", "shard_rows": 10}
    report = build(tmp_path / "out", str(tmp_path / "c.parquet"), **options)
    counts = report.encoded.counts
    assert dict(counts.skipped) == {"filtered": 25, "not_finite": 1, "null_embedding": 1}
    assert counts.read == 50 == counts.encoded + counts.reused + sum(counts.skipped.values())
    assert len(open_index(tmp_path / "out")) == counts.encoded
    everything = build(
        tmp_path / "all", str(tmp_path / "c.parquet"), **options | {"row_filter": None}
    )
    skipped = everything.encoded.counts.skipped
    assert dict(skipped) == {
        "null_id": 1,
        "not_finite": 1,
        "null_embedding": 2,
        "wrong_width": 1,
    }
    assert everything.encoded.counts.encoded == 50 - 5


def text_corpus(folder: Path, words: Sequence[str], *, files: int = 2, rows: int = 40) -> str:
    random = np.random.default_rng(20)
    for file in range(files):
        texts = [" ".join(random.choice(words, 6)) + f" {file} {i}" for i in range(rows)]
        ids = [f"{file}-{i}" for i in range(rows)]
        folder.mkdir(exist_ok=True)
        table = pa.table({"id": ids, "text": texts, "year": range(rows)})
        pq.write_table(table, folder / f"{file}.parquet")
    return str(folder)


@pytest.fixture
def texts(tmp_path: Path, tiny_words: tuple[str, ...]) -> str:
    return text_corpus(tmp_path / "corpus", tiny_words)


def text_options(model: Path, **more: Any) -> dict[str, Any]:
    plain = {"embedding_column": None, "text_columns": "text", "model": str(model)}
    return {**plain, "shard_rows": 20, "threads": 1, **more}


def test_a_build_from_the_store_alone_needs_no_encoder_and_gives_the_same_index(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    store, out = tmp_path / "store", tmp_path / "alone"
    whole = build(
        tmp_path / "whole", texts, store=str(store), keep="year", **text_options(tiny_model)
    )
    script = (
        "import sys; from whiten_index import BuildConfig, build_index, open_index\n"
        f"report = build_index(BuildConfig(store={str(store)!r}, out={str(out)!r}, k=6, "
        "whiten='whitening'))\n"
        "assert report.encoded.counts.reused == report.encoded.counts.read == 80\n"
        "assert report.encoded.counts.encoded == 0\n"
        f"assert len(open_index({str(out)!r}).search_like('1-7')) == 10\n"
        "print(*sorted({'torch', 'transformers'} & set(sys.modules)), 'loaded')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "loaded\n"), done.stderr
    assert whole.encoded.counts.encoded == 80
    queries = ["the cat sat on the mat", "stars and the moon"]
    indexes = open_index(tmp_path / "whole", device="cpu"), open_index(out, device="cpu")
    for one, other in zip(*(index.search(queries) for index in indexes), strict=True):
        assert [(hit.id, dict(hit.columns)) for hit in one] == [
            (hit.id, dict(hit.columns)) for hit in other
        ]
        np.testing.assert_allclose([h.score for h in one], [h.score for h in other], atol=1e-6)


def test_search_by_text_is_the_encoder_then_the_closed_form(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    build(tmp_path / "out", texts, store_dtype="float32", **text_options(tiny_model))
    encoder = whiten_index.Encoder.load(str(tiny_model), device="cpu", threads=1)
    files = [pq.read_table(path) for path in sorted(Path(texts).iterdir())]
    documents = pa.concat_tables(files)
    rows = encoder.encode(documents.column("text").to_pylist())
    queries = ["the cat sat on the mat", "a large red house"]
    expected = cosines(
        closed_form(encoder.encode_queries(queries), k=6, fitted_on=rows), closed_form(rows, k=6)
    )
    found = open_index(tmp_path / "out", device="cpu").search(queries, top_k=5)
    for hits, row in zip(found, expected, strict=True):
        assert_ranked_by(hits, row, tolerance=5e-5)
        assert [hit.id for hit in hits] == [documents.column("id")[hit.row].as_py() for hit in hits]


@pytest.mark.parametrize("columns", ["text", ("title", "text")])
def test_rows_without_text_are_counted_and_take_their_ids_along(
    tmp_path: Path, tiny_model: Path, columns: Any
) -> None:
    texts = ["the cat", None, "a red house", "  ", "moon and stars", ""]
    titles = [None, "", "small", " ", None, None]
    pq.write_table(
        pa.table({"id": list("abcdef"), "title": titles, "text": texts}), tmp_path / "c.parquet"
    )
    options = text_options(tiny_model, text_columns=columns, whiten="none", k=None)
    report = build(tmp_path / "out", str(tmp_path / "c.parquet"), **options)
    counts = report.encoded.counts
    assert (counts.read, counts.encoded, dict(counts.skipped)) == (6, 3, {"blank_text": 3})
    queries = ["the cat", "small a red house" if "title" in columns else "a red house"]
    found = open_index(tmp_path / "out", device="cpu").search([*queries, "moon and stars"], top_k=1)
    assert [hits[0].id for hits in found] == ["a", "c", "e"]


def test_other_ids_or_kept_columns_encode_nothing_again(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    out = tmp_path / "out"
    build(out, texts, **text_options(tiny_model))
    for change in ({"keep": ("year",)}, {"id_column": None}, {"id_column": None, "keep": ("id",)}):
        if "id" in change.get("keep", ()):
            with pytest.raises(ConfigError, match="cannot be called 'id'"):
                build(out, texts, **text_options(tiny_model, **change))
            continue
        report = build(out, texts, **text_options(tiny_model, **change))
        assert (report.encoded.counts.encoded, report.encoded.counts.reused) == (0, 80)
    hit = open_index(out, device="cpu").search(["the cat"], top_k=1)[0][0]
    assert str(hit.id).endswith(f"#0:{str(hit.id).rpartition(':')[2]}")


def test_a_changed_file_encodes_its_own_shards_only(
    tmp_path: Path, texts: str, tiny_model: Path
) -> None:
    out = tmp_path / "out"
    build(out, texts, **text_options(tiny_model))
    path = Path(texts) / "1.parquet"
    table = pq.read_table(path)
    column = [*table.column("text").to_pylist()[:-1], "the king and the queen"]
    pq.write_table(table.set_column(1, "text", pa.array(column)), path)
    report = build(out, texts, **text_options(tiny_model))
    # 40 rows a file in shards of 20: the last shard of the second file is new.
    assert (report.encoded.counts.encoded, report.encoded.counts.reused) == (20, 60)
    assert not report.up_to_date
    found = open_index(out, device="cpu").search(["the king and the queen"], top_k=1)
    assert found[0][0].id == "1-39"
    assert found[0][0].score == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("victim", ["embeddings.safetensors", "moments.safetensors"])
def test_a_damaged_shard_is_made_again_and_counted(
    tmp_path: Path, texts: str, tiny_model: Path, victim: str
) -> None:
    out = tmp_path / "out"
    first = build(out, texts, **text_options(tiny_model))
    path = sorted((out / "store").rglob(victim))[0]
    whole = load_file(path)
    damaged = bytearray(path.read_bytes())
    damaged[-5] ^= 0x40
    path.write_bytes(damaged)
    report = build(out, texts, **text_options(tiny_model))
    counts = report.encoded.counts
    assert (counts.remade_shards, counts.encoded, counts.reused) == (1, 20, 60)
    assert report.version == first.version
    for name, tensor in load_file(path).items():
        np.testing.assert_allclose(tensor, whole[name], rtol=1e-5)


def test_encode_then_build_is_build(tmp_path: Path, texts: str, tiny_model: Path) -> None:
    options = text_options(tiny_model, id_column="id")
    report = encode_corpus(BuildConfig(corpus=(texts,), store=str(tmp_path / "store"), **options))
    assert (report.counts.encoded, report.record.rows) == (80, 80)
    built = build(tmp_path / "out", texts, store=str(tmp_path / "store"), **options)
    assert built.encoded.counts.encoded == 0


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[int]:
    """Hold the build lock of a folder in another process."""
    script = (
        "import pathlib, sys\n"
        "from whiten_index.lock import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1]), what='index'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=-1, stdout=-1, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def test_a_second_build_at_once_is_refused_and_the_index_stays_searchable(tmp_path: Path) -> None:
    rows = random_rows(21)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    first = build(tmp_path / "out", corpus)
    with held_by_another_process(tmp_path / "out") as pid:
        with pytest.raises(BusyError, match=f"being written by process {pid} .*another folder"):
            build(tmp_path / "out", corpus, k=3)
        opened = open_index(tmp_path / "out")
        assert opened.bundle.version == first.version
        assert opened.search_embeddings(rows[:1], top_k=1)[0][0].id == 0
    assert build(tmp_path / "out", corpus, k=3).version != first.version


def test_the_lock_of_a_dead_process_does_not_hold(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(22))
    script = (
        "import os, pathlib, sys\n"
        "from whiten_index.lock import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1]), what='index'):\n"
        "    os._exit(9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")])
    assert done.returncode == 9
    build(tmp_path / "out", corpus)
    assert len(open_index(tmp_path / "out")) == ROWS


@pytest.mark.parametrize("damage", ["garbage", "empty", "missing", "names nothing"])
def test_the_same_build_mends_a_damaged_current(tmp_path: Path, damage: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(23))
    out = tmp_path / "out"
    build(out, corpus)
    if damage == "missing":
        (out / "CURRENT").unlink()
    else:
        gone = json.dumps({"version": "000009-gone", "manifest_sha256": "0" * 64})
        text = {"garbage": "\x00garbage", "empty": "", "names nothing": gone}[damage]
        (out / "CURRENT").write_text(text)
    build(out, corpus)
    assert len(open_index(out)) == ROWS


@pytest.mark.parametrize(
    "name",
    ["index.faiss", "documents.arrow", "whitening.safetensors", "moments.safetensors"],
)
def test_the_same_build_mends_a_damaged_version(tmp_path: Path, name: str) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(24))
    out = tmp_path / "out"
    build(out, corpus)
    path = Path(index_file(out)).with_name(name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    report = build(out, corpus)
    assert not report.up_to_date
    assert len(open_index(out, verify="full")) == ROWS


@pytest.mark.parametrize("key", ["files", "whitening", "encoder", "rows"])
def test_a_manifest_that_someone_changed_is_not_taken_for_up_to_date(
    tmp_path: Path, key: str
) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(25))
    out = tmp_path / "out"
    first = build(out, corpus)
    path = Path(index_file(out)).with_name("manifest.json")
    fields = json.loads(path.read_text())
    del fields[key]
    path.write_text(json.dumps(fields))
    report = build(out, corpus)
    assert not report.up_to_date
    assert report.version != first.version
    assert set(open_index(out).bundle.manifest) == set(fields) | {key}


def test_a_build_leaves_no_temporary_files(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(26))
    build(tmp_path / "out", corpus, shard_rows=50)
    build(tmp_path / "out", corpus, shard_rows=50, k=3)
    assert not list((tmp_path / "out").rglob("*tmp*"))


def test_build_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(27, rows=20))
    out = str(tmp_path / "out")
    with pytest.raises(ConfigError, match="--out DIR"):
        build_index(BuildConfig(corpus=(corpus,), embedding_column="embedding", store=out))
    with pytest.raises(ConfigError, match="not both"):
        BuildConfig(corpus=(corpus,), embedding_column="embedding", text_columns="t", out=out)
    with pytest.raises(ConfigError, match="--whiten 'bleach' is unknown; use auto, none, pca"):
        BuildConfig(corpus=(corpus,), embedding_column="embedding", out=out, whiten="bleach")
    with pytest.raises(ConfigError, match="--limit says how to read a corpus"):
        build_index(BuildConfig(store=str(tmp_path), out=out, limit=5))
    assert not (tmp_path / "out" / "CURRENT").exists()


def test_the_names_of_the_package_are_there_and_documented() -> None:
    names = {
        *("build_index", "encode_corpus", "open_index", "BuildConfig", "CorpusConfig"),
        *("ParquetCorpus", "Encoder", "Moments", "Whitening", "EmbeddingStore"),
        "WhitenIndexError",
    }
    assert names <= set(whiten_index.__all__) == set(dir(whiten_index))
    for name in names:
        assert getattr(whiten_index, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = whiten_index.nothing


@pytest.mark.parametrize("factor", [1e30, 1e-30])
def test_vectors_whose_squares_leave_float32_are_refused(tmp_path: Path, factor: float) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(31).astype(np.float64) * factor)
    with pytest.raises(ConfigError, match=r"too long or too short for float32.*scale"):
        build(tmp_path / "out", corpus, whiten="none", k=None)
    assert not (tmp_path / "out" / "CURRENT").exists()
