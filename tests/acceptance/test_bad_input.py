"""Bad input ends with one line of error and a status of its kind, and loses nothing."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.acceptance.commands import done, refused, run, start
from tests.acceptance.vectors import COLUMNS, DIM, OPTIONS, Place, Vectors, checksums, some

PROGRAM = Path(sys.executable).with_name("whiten-index")
SECRET = "hunter2-horse-staple"


@dataclass(frozen=True)
class Indexed(Place):
    """A corpus and the index that was built from it, which nothing may harm."""

    before: dict[str, str]

    def build(self, corpus: object) -> tuple[object, ...]:
        return ("build", corpus, *OPTIONS, "--out", self.index)

    def assert_untouched(self) -> None:
        """The published version is as it was, and so is all that it needs."""
        after = checksums(self.index / "versions")
        assert after == self.before
        done("verify", self.index)
        self.assert_searches(self.rows)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Indexed:
    place = Place(tmp_path_factory.mktemp("made") / "work", some(120)).made()
    return Indexed(place.work, place.rows, checksums(place.index / "versions"))


def with_nan(path: Path, rows: Vectors) -> None:
    damaged = rows.rows.copy()
    damaged[17, 3] = np.nan
    Vectors(rows.ids, damaged).write(path)


def with_an_id_twice(path: Path, rows: Vectors) -> None:
    (rows + rows[17:18]).write(path)


def without_an_id(path: Path, rows: Vectors) -> None:
    table = pq.read_table(rows.write(path))
    ids = pa.array([*rows.ids[:17], None, *rows.ids[18:]])
    pq.write_table(table.set_column(0, "id", ids), path)


def of_two_widths(path: Path, rows: Vectors) -> None:
    ragged = [row.tolist() for row in rows.rows]
    ragged[17] = ragged[17][:-1]
    pq.write_table(
        pa.table({"id": rows.ids, "title": rows.titles(), "embedding": ragged}), path
    )  # fmt: skip


def without_the_column(path: Path, rows: Vectors) -> None:
    pq.write_table(pq.read_table(rows.write(path)).rename_columns(["id", "title", "other"]), path)


def without_rows(path: Path, rows: Vectors) -> None:
    pq.write_table(pq.read_table(rows.write(path)).slice(0, 0), path)


def cut(path: Path, rows: Vectors) -> None:
    content = rows.write(path).read_bytes()
    path.write_bytes(content[: len(content) // 2])


def no_parquet(path: Path, rows: Vectors) -> None:
    path.write_text("id,title\n")


def nothing(path: Path, rows: Vectors) -> None:
    pass


@pytest.mark.parametrize(
    ("make", "culprit"),
    [
        (with_nan, "#0:17"), (with_an_id_twice, "d17"), (without_an_id, "#0:17"),
        (of_two_widths, "#0:17"), (without_the_column, "embedding"), (without_rows, ""),
        (cut, "bad.parquet"), (no_parquet, "bad.parquet"), (nothing, "bad.parquet"),
    ],
)  # fmt: skip
def test_a_corpus_that_cannot_be_used(
    place: Indexed, make: Callable[[Path, Vectors], None], culprit: str
) -> None:
    path = place.work / "bad.parquet"
    make(path, place.rows)
    assert culprit in refused(3, *place.build(path))
    place.assert_untouched()
    if make is not without_rows:
        assert culprit in refused(3, "update", place.index, path)
        place.assert_untouched()
    else:
        # Nothing is left of the corpus: a gate may see to that.
        assert run("update", place.index, path).status in (3, 9)
        place.assert_untouched()


def test_damaged_rows_are_skipped_where_that_is_asked_for(place: Indexed) -> None:
    path, out = place.work / "bad.parquet", place.work / "other"
    with_nan(path, place.rows)
    report = json.loads(
        done("build", path, *OPTIONS, "--on-bad-row", "skip", "--out", out, "--json")
    )
    assert report["rows"] == 119
    assert sum(report["counts"]["skipped"].values()) == 1
    place.assert_searches(place.rows[:17] + place.rows[18:], index=out)


@pytest.mark.parametrize(
    ("status", "culprit", "command"),
    [
        (2, "--nonsense", ("--nonsense", 3)),
        (2, "blackening", ("--whiten", "blackening")),
        (2, "Nonsense7", ("--factory", "Nonsense7")),
        (2, "17", ("--k", DIM + 1)),
        (2, "--k", ("--k", "many")),
        (2, "language", ("--filter", "language ==")),
        (3, "body", ("--keep", "body")),
        (3, "nowhere", ("--id-column", "nowhere")),
    ],
)
def test_a_build_that_was_not_meant_so(
    place: Indexed, status: int, culprit: str, command: tuple[object, ...]
) -> None:
    assert culprit in refused(status, *place.build(place.corpus), *command)
    place.assert_untouched()


@pytest.mark.parametrize(
    ("status", "culprit", "command"),
    [
        (5, "nothing", ("search", "{work}/nothing", "--like", "d1")),
        (5, "corpus", ("search", "{work}/corpus", "--like", "d1")),
        (5, "nothing", ("inspect", "{work}/nothing")),
        (5, "nothing", ("verify", "{work}/nothing")),
        (5, "nothing", ("push", "{work}/nothing", "--to", "{work}/v.parquet")),
        (5, "nothing", ("update", "{work}/nothing")),
        (2, "--top-k", ("search", "{work}/index", "--like", "d1", "--top-k", "0")),
        (2, "year", ("search", "{work}/index", "--like", "d1", "--filter", "year > 3")),
        (3, "nobody", ("search", "{work}/index", "--like", "nobody")),
        (2, "sometimes", ("update", "{work}/index", "--refit", "sometimes")),
        (2, "--keep", ("prune", "{work}/index", "--keep", "0")),
        (2, ".csv", ("push", "{work}/index", "--to", "{work}/v.csv")),
        (2, "--table", ("push", "{work}/index", "--to", "lancedb://{work}/lance")),
    ],
)
def test_a_command_that_finds_no_index_or_was_not_meant_so(
    place: Indexed, status: int, culprit: str, command: tuple[str, ...]
) -> None:
    arguments = [each.format(work=place.work) for each in command]
    assert culprit in refused(status, *arguments)
    assert not (place.work / "nothing").exists()
    place.assert_untouched()


def test_a_model_that_is_not_there(place: Indexed) -> None:
    texts = ("build", place.corpus, "--text-column", "title", "--out", place.index, "--model")
    assert "no-model" in refused(4, *texts, place.work / "no-model")
    (place.work / "empty-model").mkdir()
    assert "empty-model" in refused(4, *texts, place.work / "empty-model")
    place.assert_untouched()


def test_whitening_that_is_impossible(place: Indexed) -> None:
    """All rows are equal, or they are too few or too alike for the directions asked for."""
    equal = Vectors(place.rows.ids, np.ones_like(place.rows.rows))
    refused(8, *place.build(equal.write(place.work / "equal.parquet")))
    narrow = some(120, dim=5).rows @ np.random.default_rng(3).normal(size=(5, DIM))
    path = Vectors(place.rows.ids, narrow.astype(np.float32)).write(place.work / "narrow.parquet")
    assert "5" in refused(8, *place.build(path))
    assert "6 rows span no more" in refused(8, *place.build(place.corpus), "--limit", 6, "--force")
    place.assert_untouched()


def test_a_job_file_that_is_not_understood(place: Indexed) -> None:
    job = place.work / "job.toml"
    good = f'corpus = ["{place.corpus}"]\nembedding-column = "embedding"\nid-column = "id"\n'
    job.write_text(f'{good}out = "{place.work}/other"\nid-colum = "id"\n')
    assert "did you mean id_column?" in refused(2, "build", "--config", job)
    job.write_text(f'corpus = ["{place.corpus}"\n')
    assert str(job) in refused(2, "build", "--config", job)
    assert "no-job" in refused(2, "build", "--config", place.work / "no-job.toml")
    assert not (place.work / "other").exists()
    job.write_text(f'{good}out = "{place.work}/other"\n')
    done("build", "--config", job)


def test_a_file_in_the_place_of_a_folder(place: Indexed) -> None:
    file = place.work / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        line = refused(7, "build", place.corpus, *OPTIONS, "--out", out)
        assert str(file) in line
    assert file.read_text() == "mine"
    place.assert_untouched()


@pytest.mark.parametrize("blocks", [1, 8, 40])
def test_a_disk_that_takes_no_more(place: Indexed, blocks: int) -> None:
    """No file can have more blocks of 512 bytes; afterwards the same command ends well."""
    rows = place.rows + some(1000, "more")
    place.write(rows)
    command = list(map(str, (PROGRAM, *place.build(place.corpus), "--shard-rows", 200)))
    limited = ["sh", "-c", f'ulimit -f {blocks}; exec "$0" "$@"', *command]
    ended = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert ended.returncode == 7, (ended.returncode, ended.stderr)
    assert "Traceback" not in ended.stderr
    assert ended.stderr.strip().splitlines()[-1].startswith("Error: ")
    place.assert_untouched()
    done(*place.build(place.corpus))
    place.assert_searches(rows)


def test_output_that_nobody_reads(place: Indexed) -> None:
    """The work is done; the reader that has gone is no error to tell of."""
    place.write(rows := place.rows + some(20, "more"))
    process = start(*place.build(place.corpus))
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    stderr = process.stderr.read()
    assert process.wait(timeout=120) == 141
    assert stderr == ""
    place.assert_searches(rows)


def test_output_that_cannot_be_written(place: Indexed) -> None:
    """The version is published all the same."""
    place.write(rows := place.rows + some(20, "more"))
    command = list(map(str, (PROGRAM, *place.build(place.corpus))))
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 7
    assert ended.stderr.strip().splitlines()[-1].startswith("Error: ")
    place.assert_searches(rows)


def test_queries_that_do_not_fit(place: Indexed) -> None:
    run_file = place.work / "run.trec"
    wide = some(5, "wide", dim=DIM + 1).write(place.work / "wide.parquet")
    order = ("search", place.index, *COLUMNS, "--run", run_file, "--queries")
    ended = run(*order, wide)
    assert ended.status in (2, 3), ended.err
    assert str(DIM + 1) in ended.err
    with_nan(place.work / "nan.parquet", place.rows)
    refused(3, *order, place.work / "nan.parquet")
    assert "gone" in refused(3, *order, place.work / "gone.parquet")
    assert not run_file.exists()
    assert len(place.search(some(5, "query").rows)) == 5
