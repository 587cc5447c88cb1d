"""A transform fitted on a log of queries: its moments, auto, drift of the log, refusals."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.builds import DIM, build, random_rows, write_rows
from whiten_index import (
    BuildConfig,
    Moments,
    UpdateConfig,
    Whitening,
    WhiteningConfig,
    build_index,
    load_encoder,
    open_index,
    update_index,
)
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.progress import Progress
from whiten_index.whitening.whitening_config import Kind


def write_log(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_the_transform_is_that_of_the_queries(tmp_path: Path) -> None:
    rows, queries = random_rows(0), random_rows(7, rows=90, mean=1.0)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    # Other columns of a log are not looked at, and a query asked twice counts twice.
    asked = [*queries, queries[0]]
    log = write_log(tmp_path / "log.parquet", embedding=asked, time=list(range(91)))
    for whiten in ("whitening", "pca"):
        # Another log, or none, makes another version of the same place.
        build(tmp_path / whiten, corpus, whiten=whiten)
        build(tmp_path / whiten, corpus, whiten=whiten, query_log=log)
        found = open_index(tmp_path / whiten)
        wanted = WhiteningConfig(kind=Kind(whiten), k=6)
        expected = Whitening.fit(Moments.of(np.array(asked, dtype=np.float64)), wanted)
        np.testing.assert_allclose(found.bundle.whitening.mean, expected.mean, rtol=1e-5)
        given = expected.apply(queries[:5])
        np.testing.assert_allclose(found.bundle.whitening.apply(queries[:5]), given, rtol=1e-3)
        exact = expected.vectors(queries[:5]) @ expected.vectors(rows).T
        hits = found.search_embeddings(queries[:5], top_k=3)
        assert [[hit.id for hit in each] for each in hits] == np.argsort(-exact)[:, :3].tolist()


def test_texts_of_a_log_are_encoded_as_queries(
    tmp_path: Path, tiny_model: Path, texts: list[str]
) -> None:
    rng = np.random.default_rng(0)
    words = sorted({word for text in texts for word in text.split()})
    corpus = write_log(tmp_path / "c.parquet", text=texts)
    asked = [" ".join(rng.choice(words, 5)) for _ in range(120)]
    log = write_log(tmp_path / "log.parquet", text=asked)
    build_index(
        BuildConfig(
            corpus=corpus, text_columns="text", model=str(tiny_model), query_prompt="w1 ", k=8,
            whiten="pca", query_log=log, out=str(tmp_path / "index"), threads=1,
        )
    )  # fmt: skip
    bundle = open_index(tmp_path / "index").bundle
    encoder = load_encoder(str(tiny_model), query_prompt="w1 ", threads=1)
    mean = encoder.encode_queries(asked).mean(axis=0)
    np.testing.assert_allclose(bundle.whitening.mean, mean, atol=1e-3)


def spread(seed: int, rows: int, wide: slice) -> Any:
    """Rows of twelve dims that differ much in some, and less in the others."""
    scales = np.full(DIM, 0.5)
    scales[wide] = 2
    return (np.random.default_rng(seed).standard_normal((rows, DIM)) * scales).astype(np.float32)


def test_auto_fits_on_the_log_only_if_its_directions_find_more(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", spread(0, 400, slice(0, 6)))
    last, first = spread(1, 600, slice(6, 12)), spread(2, 600, slice(0, 6))
    last[:, :6] *= 0.02
    chosen = {}
    for name, rows in {"last": last, "first": first, "few": last[:4]}.items():
        log = write_log(tmp_path / f"{name}.parquet", embedding=list(rows))
        build(tmp_path / name, corpus, whiten="auto", query_log=log)
        chosen[name] = open_index(tmp_path / name).bundle
    named = build(tmp_path / "named", corpus, query_log=str(tmp_path / "first.parquet"))
    why = {name: bundle.manifest["choice"]["why"] for name, bundle in chosen.items()}
    assert "fitted on the query log: at 6 dims half of the query log finds" in why["last"]
    assert "fitted on the documents: at 6 dims half of the query log finds" in why["first"]
    assert "fitted on the documents, as the query log has too few queries" in why["few"]
    # What the directions keep of the dims in which people ask.
    kept = {name: np.abs(b.whitening.basis[6:]).sum() for name, b in chosen.items()}
    assert kept["last"] > 5 > 2 > kept["first"] == kept["few"]
    digests = {name: b.manifest["query_log"] for name, b in chosen.items()}
    assert digests["first"] is None
    assert digests["few"] is None
    assert digests["last"] is not None
    # A transform that is named is fitted on the log in any case.
    assert named.manifest["query_log"] is not None


def test_a_log_that_was_not_fitted_on_is_read_again_only_if_auto_chooses_again(
    tmp_path: Path,
) -> None:
    corpus = write_rows(tmp_path / "c.parquet", spread(0, 400, slice(0, 6)))
    log = write_log(tmp_path / "log.parquet", embedding=list(spread(2, 600, slice(0, 6))))
    index = str(tmp_path / "index")
    build(Path(index), corpus, whiten="auto", query_log=log)
    other = spread(1, 600, slice(6, 12))
    other[:, :6] *= 0.02
    write_log(tmp_path / "log.parquet", embedding=list(other))
    assert update_index(UpdateConfig(index=index, query_log=log)).up_to_date
    (tmp_path / "log.parquet").rename(tmp_path / "moved.parquet")
    assert update_index(UpdateConfig(index=index)).up_to_date
    moved = str(tmp_path / "moved.parquet")
    update_index(UpdateConfig(index=index, query_log=moved, choose_again=True))
    assert "fitted on the query log" in open_index(index).bundle.manifest["choice"]["why"]
    # From now on the log is measured.
    write_log(tmp_path / "moved.parquet", embedding=list(spread(4, 600, slice(3, 9))))
    done = update_index(UpdateConfig(index=index, query_log=moved))
    assert done.update["decision"]["whitening"] == "refit"


def test_an_update_measures_the_drift_of_the_log(tmp_path: Path) -> None:
    rows = random_rows(0)
    corpus = write_rows(tmp_path / "c.parquet", rows)
    log = write_log(tmp_path / "log.parquet", embedding=list(random_rows(7, rows=300)))
    build(tmp_path / "index", corpus, query_log=log)
    # Other documents change nothing of a transform of queries.
    write_rows(tmp_path / "c.parquet", random_rows(3, mean=3.0))
    same = update_index(UpdateConfig(index=str(tmp_path / "index"), max_shrink=1))
    assert same.update["decision"]["whitening"] == "keep"
    assert same.update["drift"]["kl_per_dim"] == pytest.approx(0, abs=1e-6)
    assert update_index(UpdateConfig(index=str(tmp_path / "index"))).up_to_date
    write_log(tmp_path / "log.parquet", embedding=list(random_rows(9, rows=300, mean=4.0)))
    other = update_index(UpdateConfig(index=str(tmp_path / "index")))
    assert other.update["decision"]["whitening"] == "refit"
    mean = random_rows(9, rows=300, mean=4.0).mean(axis=0)
    fitted = open_index(tmp_path / "index").bundle.whitening.mean
    np.testing.assert_allclose(fitted, mean, rtol=1e-4, atol=1e-4)
    (tmp_path / "log.parquet").rename(tmp_path / "moved.parquet")
    with pytest.raises(CorpusError, match=r"log.parquet is not a readable .* name another"):
        update_index(UpdateConfig(index=str(tmp_path / "index")))
    moved = str(tmp_path / "moved.parquet")
    assert update_index(UpdateConfig(index=str(tmp_path / "index"), query_log=moved)).up_to_date


def test_a_log_that_cannot_be_fitted_on_is_refused(tmp_path: Path) -> None:
    corpus = write_rows(tmp_path / "c.parquet", random_rows(0))
    narrow = write_log(tmp_path / "narrow.parquet", embedding=[[0.5] * (DIM - 1)] * 40)
    with pytest.raises(CorpusError, match=rf"expected {DIM} numbers"):
        build(tmp_path / "o", corpus, query_log=narrow)
    with pytest.raises(CorpusError, match=r"none.parquet is not a readable"):
        build(tmp_path / "o", corpus, query_log=str(tmp_path / "none.parquet"))
    texts = write_log(tmp_path / "texts.parquet", text=["a", "b"])
    with pytest.raises(ConfigError, match="name the model of the embedding column with --model"):
        build(tmp_path / "o", corpus, query_log=texts)
    odd = write_log(tmp_path / "odd.parquet", question=["a", "b"])
    with pytest.raises(CorpusError, match="no column embedding or text"):
        build(tmp_path / "o", corpus, query_log=odd)
    with pytest.raises(ConfigError, match="--query-log fits a transform, and --whiten none fits"):
        build(tmp_path / "o", corpus, query_log=texts, whiten="none", k=None)
    assert not (tmp_path / "o" / "CURRENT").exists()


def test_a_log_that_is_no_plain_table_is_refused(tmp_path: Path) -> None:
    corpus, rows = write_rows(tmp_path / "c.parquet", random_rows(0)), list(random_rows(7))
    os.mkfifo(tmp_path / "pipe.parquet")
    wide = pa.FixedSizeListArray.from_arrays(np.zeros(20 * 4_000, np.float32), 4_000)
    pq.write_table(pa.table({"embedding": wide}), tmp_path / "wide.parquet", row_group_size=5)
    twice = pa.Table.from_arrays([pa.array(rows)] * 2, names=["embedding"] * 2)
    pq.write_table(twice, tmp_path / "twice.parquet")
    write_log(tmp_path / "empty.parquet", embedding=pa.array([], pa.list_(pa.float32())))
    for name, why in {
        "pipe": "is a pipe, a socket or a device",
        "twice": "names a column twice",
        "empty": "is empty: it holds no rows",
        "wide": f"expected {DIM} numbers",
    }.items():
        with pytest.raises(CorpusError, match=rf"{name}.parquet.*{why}"):
            build(tmp_path / "o", corpus, query_log=str(tmp_path / f"{name}.parquet"))


@pytest.mark.parametrize("encoded", [False, True])
def test_a_log_that_unpacks_to_gigabytes_is_refused(
    tmp_path: Path, tiny_model: Path, texts: list[str], encoded: bool
) -> None:
    """Each row names the same long text."""
    corpus = write_log(tmp_path / "c.parquet", text=texts)
    places = pa.array(np.zeros(11_000, np.int32))
    packed = pa.DictionaryArray.from_arrays(places, pa.array(["x" * 100_000]))
    path = tmp_path / "log.parquet"
    pq.write_table(pa.table({"text": packed}), path, store_schema=encoded)
    with pytest.raises(CorpusError, match="it unpacks to more than"):
        build_index(
            BuildConfig(
                corpus=corpus, text_columns="text", model=str(tiny_model), whiten="pca", k=8,
                query_log=str(path), out=str(tmp_path / "index"), threads=1,
            )
        )  # fmt: skip


def test_a_log_that_changes_during_the_fit_is_refused(
    tmp_path: Path, tiny_model: Path, texts: list[str]
) -> None:
    corpus = write_log(tmp_path / "c.parquet", text=texts)
    log = write_log(tmp_path / "log.parquet", text=texts[:20])

    class Writer(Progress):
        def start(self, stage: str, total: int) -> None:
            if stage == "encode queries":
                write_log(tmp_path / "log.parquet", text=texts[20:])

    with pytest.raises(CorpusError, match=r"log.parquet changed while it was read"):
        build_index(
            BuildConfig(
                corpus=corpus, text_columns="text", model=str(tiny_model), whiten="pca", k=8,
                query_log=log, out=str(tmp_path / "index"), threads=1,
            ),
            progress=Writer(),
        )  # fmt: skip
    assert not (tmp_path / "index" / "CURRENT").exists()
