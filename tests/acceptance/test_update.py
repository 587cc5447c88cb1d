"""Bring an index up to date with a corpus that changed, and keep back what looks wrong."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.acceptance.commands import done, refused, run
from tests.acceptance.truth import SciFact, encode, nearest, whitening
from tests.acceptance.vectors import K, Place, Vectors, checksums, some


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("made") / "work", some(400)).made()


@pytest.mark.parametrize("refit", ["never", "always"])
def test_searches_equal_brute_force_over_the_new_corpus(place: Place, refit: str) -> None:
    """Rows are whitened by the old rows' moments or, where it is fitted again, by all of today's.

    The latter come from those of the old rows, less what left, plus what came.
    """
    today = place.change()
    report = json.loads(done("update", place.index, "--refit", refit, "--json"))
    counts = {"total": 402, "new": 12, "changed": 5, "deleted": 10, "document": 0, "unchanged": 385}
    assert report["rows"] == counts
    assert (report["counts"]["encoded"], report["up_to_date"]) == (17, False)
    assert report["version"] == place.published()
    fitted = today if refit == "always" else place.rows
    place.assert_searches(today, fitted=fitted)


def test_an_unchanged_corpus_publishes_nothing(place: Place) -> None:
    before, version = checksums(place.index / "versions"), place.published()
    report = json.loads(done("update", place.index, "--json"))
    assert (report["up_to_date"], report["rows"]["unchanged"]) == (True, 400)
    # A file that was written anew is read, and has the same rows.
    place.write(place.rows)
    assert json.loads(done("update", place.index, "--json"))["up_to_date"]
    assert checksums(place.index / "versions") == before
    assert place.published() == version


def test_rows_that_come_back_are_not_encoded_again(place: Place) -> None:
    away = place.work / "b.parquet"
    (place.corpus / "b.parquet").rename(away)
    options = ("--refit", "never", "--max-shrink", 0.6)
    report = json.loads(done("update", place.index, *options, "--json"))
    assert report["rows"]["deleted"] == 200
    place.assert_searches(place.rows[:200], fitted=place.rows)
    away.rename(place.corpus / "b.parquet")
    report = json.loads(done("update", place.index, *options, "--json"))
    assert (report["rows"]["new"], report["counts"]["encoded"]) == (200, 0)
    place.assert_searches(place.rows, fitted=place.rows)


def test_rows_without_ids_are_named_by_their_places(place: Place) -> None:
    """Rows are told apart by their content; what did not change is not encoded again."""
    index = place.work / "places"
    options = ("--whiten", "whitening", "--k", K, "--factory", "Flat", "--out", index)
    done("build", place.corpus, "--embedding-column", "embedding", *options)
    (place.rows[:50] + place.rows[60:200]).write(place.corpus / "a.parquet")
    report = json.loads(done("update", index, "--refit", "never", "--json"))
    assert (report["rows"]["total"], report["counts"]["encoded"]) == (390, 0)
    names = [f"a.parquet#0:{i}" for i in range(190)] + [f"b.parquet#0:{i}" for i in range(200)]
    now = place.rows[:50] + place.rows[60:]
    place.assert_searches(Vectors(names, now.rows), fitted=place.rows, index=index)


def test_the_changes_are_listed_for_a_copy_elsewhere(place: Place) -> None:
    base = place.published()
    titles = place.rows[200:].titles()
    titles[3] = "another title"
    (place.rows[:4].moved() + place.rows[10:200]).write(place.corpus / "a.parquet")
    place.rows[200:].write(place.corpus / "b.parquet", title=titles)
    some(2, "new").write(place.corpus / "c.parquet")
    report = json.loads(done("update", place.index, "--refit", "never", "--json"))
    assert (report["rows"]["document"], report["counts"]["encoded"]) == (1, 6)
    path = place.version / "changes.arrow"
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    assert dict(zip(table["id"].to_pylist(), table["kind"].to_pylist(), strict=True)) == {
        **dict.fromkeys(place.rows.ids[:4], "changed"),
        **dict.fromkeys(place.rows.ids[4:10], "deleted"),
        **dict.fromkeys(["new0", "new1"], "new"),
        "d203": "document",
    }
    metadata = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert (metadata["base"], metadata["whitening"]) == (base, "keep")
    hits = json.loads(done("search", place.index, "--like", "d20", "--top-k", 400, "--json"))
    shown = {hit["id"]: hit["columns"]["title"] for hit in hits["results"][0]["hits"]}
    assert (shown["d203"], shown["d204"]) == ("another title", "title of d204")


def test_drift_is_measured_and_the_transform_fitted_again(place: Place) -> None:
    """The divergence is that of two Gaussians, of today's rows and of those at the fit."""
    moved = Vectors(place.rows.ids, place.rows.rows.copy())
    moved.rows[:200] *= 1.5
    moved.rows[:200] += np.linspace(-1, 1, moved.rows.shape[1], dtype=np.float32)
    place.write(moved)
    kept = json.loads(done("update", place.index, "--refit", "never", "--json"))
    mean, matrix = whitening(place.rows.rows.astype(np.float64), K)
    today = (moved.rows.astype(np.float64) - mean) @ matrix
    shift, covariance = today.mean(axis=0), np.cov(today.T)
    divergence = (
        np.trace(covariance) + shift @ shift - K - np.linalg.slogdet(covariance)[1]
    ) / 2  # fmt: skip
    assert kept["drift"]["kl_per_dim"] == pytest.approx(divergence / K, rel=1e-2)
    assert kept["decision"]["whitening"] == "keep"
    place.assert_searches(moved, fitted=place.rows)
    # The drift since the fit stays known; auto does what never left.
    some(1, "new").write(place.corpus / "c.parquet")
    report = json.loads(done("update", place.index, "--json"))
    assert report["decision"]["whitening"] == "refit"
    place.assert_searches(moved + some(1, "new"))


def test_rows_of_the_same_distribution_keep_the_transform(place: Place) -> None:
    today = place.rows[40:] + some(40, "new")
    place.write(today)
    report = json.loads(done("update", place.index, "--json"))
    assert report["decision"]["whitening"] == "keep"
    place.assert_searches(today, fitted=place.rows)


def test_texts_that_are_new_are_encoded_and_a_reader_takes_the_new_version(
    index: Path, scifact: SciFact, embeddings: np.ndarray, tmp_path: Path
) -> None:
    """An open index answers as it did until it is told to look again."""
    corpus = tmp_path / "corpus"
    rows = pq.read_table(corpus / "a.parquet").to_pylist()
    fresh = dict.fromkeys(rows[0], None) | {
        "id": type(rows[0]["id"])(999_999_999), "title": "Lighthouses",
        "text": "Keepers of a lighthouse trim the lamp every night.",
    }  # fmt: skip
    changed = {**rows[3], "text": "A short text about volcanoes."}
    table = [*rows[:3], changed, *rows[5:], fresh]
    schema = pq.read_schema(corpus / "a.parquet")
    pq.write_table(pa.Table.from_pylist(table, schema), corpus / "a.parquet")
    open_index = whiten_index.open_index(index)
    assert not open_index.reload()
    report = json.loads(done("update", index, corpus, "--refit", "never", "--json"))
    assert report["counts"]["encoded"] == 2
    query = "Who looks after the lamp of a lighthouse?"
    assert fresh["id"] not in {hit.id for hit in open_index.search([query])[0]}
    assert open_index.reload()

    made = encode([f"{each['title']} {each['text']}" for each in (changed, fresh)] + [query])
    half = len(rows)
    now = np.concatenate(
        [embeddings[:3], made[:1], embeddings[5:half], made[1:2], embeddings[half:]]
    )
    mean, matrix = whitening(embeddings, 64)
    _, best = nearest((now - mean) @ matrix, (made[2:] - mean) @ matrix, 10)
    hits = open_index.search([query], top_k=10)[0]
    assert hits[0].id == fresh["id"]
    assert hits[0].columns["title"] == "Lighthouses"
    assert [hit.score for hit in hits] == pytest.approx(best[0].tolist(), abs=1e-3)


def write_canaries(path: Path, queries: np.ndarray, expected: Sequence[Sequence[str]]) -> Path:
    values = pa.array(queries.astype(np.float32).ravel())
    column = pa.FixedSizeListArray.from_arrays(values, queries.shape[1])
    pq.write_table(pa.table({"embedding": column, "expected": list(map(list, expected))}), path)
    return path


@pytest.mark.parametrize(
    ("rows", "wide"),
    [(slice(0, 250), ("--max-shrink", 0.5)), (slice(None), ("--max-growth", 3))],
    ids=["shrink", "growth"],
)
def test_far_fewer_or_more_rows_are_kept_back_until_it_is_meant(
    place: Place, rows: slice, wide: tuple[str, float]
) -> None:
    today = place.rows[rows] if rows.stop else place.rows + some(500, "new")
    place.write(today)
    before, version = checksums(place.index), place.published()
    foreseen = run("update", place.index, "--dry-run", "--json")
    assert (foreseen.status, bool(foreseen.json["refused"])) == (9, True)
    assert checksums(place.index) == before
    before = checksums(place.index / "versions")
    assert wide[0] in refused(9, "update", place.index)
    assert place.published() == version
    assert checksums(place.index / "versions") == before
    assert len(list((place.index / "candidates").iterdir())) == 1
    place.assert_searches(place.rows)
    done("update", place.index, *wide, "--refit", "never")
    assert place.published() != version
    place.assert_searches(today, fitted=place.rows)


def test_a_version_that_is_too_large_is_kept_back(place: Place) -> None:
    place.change()
    version = place.published()
    assert "--max-bytes" in refused(9, "update", place.index, "--max-bytes", "1KiB")
    assert place.published() == version


def test_canaries_that_do_not_find_their_documents_keep_a_version_back(place: Place) -> None:
    today = place.change()
    queries, version = some(3, "query").rows, place.published()
    # Rows that the change leaves as they are.
    same = set(place.rows.ids[:150] + place.rows.ids[165:])
    found = place.search(queries, top_k=5)
    near = [[each for each, _ in hits if each in same][:2] for hits in found]
    assert all(near)
    wrong = write_canaries(place.work / "wrong.parquet", queries, [*near[:2], ["d155"]])
    order = ("update", place.index, "--refit", "never", "--canary-file")
    refused(9, *order, wrong)
    assert place.published() == version
    place.assert_searches(place.rows)
    done(*order, write_canaries(place.work / "right.parquet", queries, near))
    place.assert_searches(today, fitted=place.rows)


def test_a_corpus_that_was_rolled_back_is_not_published_again(place: Place) -> None:
    today, first = place.change(), place.published()
    done("update", place.index, "--refit", "never")
    second = place.published()
    done("rollback", place.index)
    assert place.published() == first
    refused(9, "update", place.index, place.corpus, "--refit", "never")
    assert place.published() == first
    done("rollback", place.index, "--to", second)
    place.assert_searches(today, fitted=place.rows)
