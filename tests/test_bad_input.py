"""Bad input: one sentence, an exit status, and what was published before stays searchable."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from whiten_index.cli import cli

ROWS, DIM = 60, 6
OPTIONS, CORPUS, ENCODER, ARTIFACT, BUSY, DISK, WHITENING = range(2, 9)


def run(*arguments: Any) -> tuple[int, str, str]:
    """Return exit status, standard output and standard error; an exception that leaks fails."""
    result = CliRunner().invoke(cli, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def assert_one_error(stderr: str, *, match: str) -> None:
    """Standard error is one line ``Error: …``, after nothing but click's reminder of the usage."""
    *before, last = stderr.splitlines()
    assert last.startswith("Error: "), stderr
    assert re.search(match, last), last
    assert "Traceback" not in stderr
    assert all(not line or line.startswith(("Usage: ", "Try '")) for line in before), stderr


def numbers(seed: int = 0, rows: int = ROWS) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, DIM)).astype(np.float32)


def table(rows: int = ROWS, **columns: Any) -> pa.Table:
    """Return a sound corpus with some columns replaced."""
    sound = {
        "id": [f"d{i}" for i in range(rows)],
        "e": list(numbers(rows=rows)),
        "text": [f"the cat {i}" for i in range(rows)],
        "year": list(range(rows)),
    }
    return pa.table({**sound, **columns})


@dataclass(frozen=True)
class Place:
    """A folder with a published index, and what was found in it then."""

    root: Path
    found: str

    @property
    def out(self) -> Path:
        return self.root / "out"

    def write(self, content: pa.Table, name: str = "bad/bad.parquet") -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(content, path, write_page_checksum=True)
        return path.parent

    def assert_unharmed(self) -> None:
        status, stdout, stderr = run("search", self.out, "--like", "d7", "--json")
        assert (status, stdout) == (0, self.found), stderr
        assert not [p for p in self.root.rglob("*") if p.name.startswith(".tmp")]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("published")
    (root / "good").mkdir()
    pq.write_table(table(), root / "good" / "c.parquet")
    arguments = ("--embedding-column", "e", "--id-column", "id", "--k", 3, "--out", root / "out")
    assert run("build", root / "good", *arguments)[0] == 0
    return root


@pytest.fixture
def place(tmp_path: Path, published: Path) -> Place:
    shutil.copytree(published, tmp_path / "place")
    status, stdout, _ = run("search", tmp_path / "place" / "out", "--like", "d7", "--json")
    assert status == 0
    return Place(tmp_path / "place", stdout)


def assert_refused(place: Place, arguments: tuple[Any, ...], status: int, match: str) -> None:
    found, stdout, stderr = run(*arguments)
    assert found == status, stderr or stdout
    assert_one_error(stderr, match=match)
    place.assert_unharmed()


EMBEDDED = ("--embedding-column", "e", "--id-column", "id")


def with_value(position: int, value: Any, rows: int = ROWS) -> list[Any]:
    return [value if i == position else list(row) for i, row in enumerate(numbers(rows=rows))]


def constant(width: int = DIM) -> list[list[float]]:
    return [[0.25] * width] * ROWS


def rank_two() -> list[Any]:
    basis = np.random.default_rng(1).standard_normal((2, DIM))
    return list(np.random.default_rng(2).standard_normal((ROWS, 2)) @ basis)


NAN, INF = float("nan"), float("inf")
TABLES: dict[str, tuple[Callable[[], pa.Table], tuple[Any, ...], int, str]] = {
    "missing embedding column": (
        table,
        ("--embedding-column", "nope"),
        CORPUS,
        "no column 'nope'; its columns are id, e, text, year",
    ),
    "missing kept column": (table, (*EMBEDDED, "--keep", "nope"), CORPUS, "columns are id, e"),
    "missing id column": (
        table,
        ("--embedding-column", "e", "--id-column", "nope"),
        CORPUS,
        "no column 'nope'",
    ),
    "filter on a missing column": (
        table,
        (*EMBEDDED, "--filter", "lang == 'en'"),
        CORPUS,
        "no column 'lang'",
    ),
    "filter that is no condition": (table, (*EMBEDDED, "--filter", "year +"), OPTIONS, "filter"),
    "filter that calls": (
        table,
        (*EMBEDDED, "--filter", "__import__('os').getcwd() == 1"),
        OPTIONS,
        "not understood",
    ),
    "filter of another type": (table, (*EMBEDDED, "--filter", "year == 'x'"), CORPUS, "filter"),
    "filter that nothing passes": (
        table,
        (*EMBEDDED, "--filter", "year > 999"),
        CORPUS,
        "none of the 60 rows .*60 filtered",
    ),
    "text for an embedding column": (
        table,
        ("--embedding-column", "text"),
        CORPUS,
        "'text' .*is string; .*columns that fit: e",
    ),
    "an embedding for an id": (
        table,
        ("--embedding-column", "e", "--id-column", "e"),
        CORPUS,
        "an id column takes strings or integers; columns that fit: id, text, year",
    ),
    "number for a text column": (
        table,
        ("--text-column", "year"),
        CORPUS,
        "a text column takes strings; columns that fit: id, text",
    ),
    "no column": (table, (), OPTIONS, "--text-column .* or --embedding-column"),
    "both columns": (table, (*EMBEDDED, "--text-column", "text"), OPTIONS, "not both"),
    "no rows": (lambda: table().slice(0, 0), EMBEDDED, CORPUS, "holds no rows"),
    "only nulls": (
        lambda: table(e=pa.array([None] * ROWS, pa.list_(pa.float32()))),
        EMBEDDED,
        CORPUS,
        "every value of e is null|60 without e",
    ),
    "duplicate ids": (
        lambda: table(id=[f"d{i % 59}" for i in range(ROWS)]),
        EMBEDDED,
        CORPUS,
        "1 ids? of column id occurs? more than once .*'d0'",
    ),
    "null id": (
        lambda: table(id=[None, *map(str, range(ROWS - 1))]),
        EMBEDDED,
        CORPUS,
        "bad.parquet#0:0 .*has no id",
    ),
    "NaN": (lambda: table(e=with_value(9, [NAN] * DIM)), EMBEDDED, CORPUS, "#0:9 .*NaN"),
    "infinity": (
        lambda: table(e=with_value(8, [INF] + [0.0] * (DIM - 1))),
        EMBEDDED,
        CORPUS,
        "#0:8 .*infinity",
    ),
    "a null inside": (
        lambda: table(e=with_value(7, [None] + [0.0] * (DIM - 1))),
        EMBEDDED,
        CORPUS,
        "#0:7 .*NaN",
    ),
    "another width": (lambda: table(e=with_value(6, [1.0])), EMBEDDED, CORPUS, "#0:6 .*width"),
    "null embedding, strict": (
        lambda: table(e=with_value(5, None)),
        (*EMBEDDED, "--on-bad-row", "error"),
        CORPUS,
        "#0:5 .*has no e",
    ),
    "beyond float32": (
        lambda: table(e=with_value(4, [1e100] * DIM)),
        (*EMBEDDED, "--whiten", "none"),
        OPTIONS,
        "beyond float32",
    ),
    "beyond the square root of float64": (
        lambda: table(e=with_value(4, [1e200] * DIM)),
        EMBEDDED,
        OPTIONS,
        "beyond|large|scale",
    ),
    "fewer rows than k": (
        lambda: table(rows=4),
        (*EMBEDDED, "--k", 5),
        WHITENING,
        "k = 5 is above the rank 3 .*4 rows",
    ),
    "one row": (lambda: table(rows=1), (*EMBEDDED, "--k", 1), WHITENING, "more than 1 rows?"),
    "constant embeddings": (
        lambda: table(e=constant()),
        EMBEDDED,
        WHITENING,
        "all 60 embeddings are equal",
    ),
    "k above the rank": (
        lambda: table(e=rank_two()),
        (*EMBEDDED, "--k", 3),
        WHITENING,
        "above the rank 2 .*--k 2 or less, or --k full",
    ),
    "k above the width": (table, (*EMBEDDED, "--k", DIM + 1), OPTIONS, "more than the 6 dims"),
    "k of 0": (table, (*EMBEDDED, "--k", "0"), OPTIONS, "--k 0 is not understood"),
    "negative k": (table, (*EMBEDDED, "--k=-3"), OPTIONS, "not understood"),
    "k of a half": (table, (*EMBEDDED, "--k", "2.5"), OPTIONS, "not understood"),
    "k that is NaN": (table, (*EMBEDDED, "--k", "nan"), OPTIONS, "not understood"),
    "k that is infinite": (table, (*EMBEDDED, "--k", "inf"), OPTIONS, "not understood"),
    "k in words": (table, (*EMBEDDED, "--k", "many"), OPTIONS, "'full'"),
    "k with none": (table, (*EMBEDDED, "--whiten", "none", "--k", "3"), OPTIONS, "cannot apply"),
    "exponent of PCA": (
        table,
        (*EMBEDDED, "--whiten", "pca", "--exponent", "0.5"),
        OPTIONS,
        "PCA has exponent 0",
    ),
    "exponent that is NaN": (table, (*EMBEDDED, "--exponent", "nan"), OPTIONS, "--exponent"),
    "unknown whitening": (table, (*EMBEDDED, "--whiten", "bleach"), OPTIONS, "auto.*none.*pca"),
    "factory with its own PCA": (
        table,
        (*EMBEDDED, "--factory", "PCA4,Flat"),
        OPTIONS,
        "transform of its own .*--k",
    ),
    "factory with its own norm": (
        table,
        (*EMBEDDED, "--factory", "L2norm,Flat"),
        OPTIONS,
        "transform of its own",
    ),
    "factory with a PCA inside": (
        table,
        (*EMBEDDED, "--factory", "PCA4,Flat,RFlat"),
        OPTIONS,
        "transform of its own",
    ),
    "factory with ids": (table, (*EMBEDDED, "--factory", "IDMap,Flat"), OPTIONS, "IDMap"),
    "factory unknown": (table, (*EMBEDDED, "--factory", "Tree"), OPTIONS, "FAISS cannot make"),
    "factory that does not divide": (
        table,
        (*EMBEDDED, "--k", 5, "--factory", "PQ2"),
        OPTIONS,
        "FAISS cannot make 'PQ2' over 5 dims",
    ),
    "factory with too many lists": (
        table,
        (*EMBEDDED, "--factory", "IVF500,Flat"),
        OPTIONS,
        "cannot train 'IVF500,Flat' on 60 rows",
    ),
    "limit of 0": (table, (*EMBEDDED, "--limit", "0"), OPTIONS, "--limit"),
    "kept column called id": (
        table,
        ("--embedding-column", "e", "--keep", "id"),
        OPTIONS,
        "cannot be called 'id'",
    ),
    "no such model": (table, ("--text-column", "text", "--model", "./none"), ENCODER, "./none"),
    "layers in words": (
        table,
        ("--text-column", "text", "--layers", "first"),
        OPTIONS,
        "no list of layers",
    ),
}


@pytest.mark.parametrize("name", list(TABLES))
def test_a_corpus_or_option_that_cannot_be_used(place: Place, name: str) -> None:
    make, options, status, match = TABLES[name]
    corpus = place.write(make())
    assert_refused(place, ("build", corpus, *options, "--out", place.out), status, match)


TEXTS: dict[str, tuple[list[Any], tuple[Any, ...], int, str]] = {
    "null text": ([*"abc", None], ("--on-bad-row", "error"), CORPUS, "#0:3 .*no text in text"),
    "blank text": (["a", " \t\n", "b"], ("--on-bad-row", "error"), CORPUS, "#0:1 .*no text"),
    "only blanks": (["", None, "  "], (), CORPUS, "none of the 3 rows .*3 blank_text"),
    "length beyond the model": (["a", "b"], ("--max-length", 99), OPTIONS, "more than the 32"),
    "length without room": (["a", "b"], ("--max-length", 2), OPTIONS, "at least 3"),
    "layer beyond the model": (["a", "b"], ("--layers", "3"), OPTIONS, "layer 3 does not exist"),
    "device unknown": (["a", "b"], ("--device", "abacus"), OPTIONS, "device 'abacus'"),
}


@pytest.mark.parametrize("name", list(TEXTS))
def test_texts_or_encoder_options_that_cannot_be_used(
    place: Place, tiny_model: Path, name: str
) -> None:
    texts, options, status, match = TEXTS[name]
    corpus = place.write(pa.table({"text": pa.array(texts, pa.string())}))
    arguments = ("--text-column", "text", "--model", tiny_model, *options, "--out", place.out)
    assert_refused(place, ("build", corpus, *arguments), status, match)


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 0xFF
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "truncated": _truncated,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": _flipped,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("id,text\n1,hello\n"),
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_corrupt_file_among_good_ones_is_named(place: Place, damage: str) -> None:
    for name in "ace":
        part = table(id=[f"{name}{i}" for i in range(ROWS)], e=list(numbers(ord(name))))
        corpus = place.write(part, f"bad/{name}.parquet")
    DAMAGE[damage](corpus / "c.parquet")
    arguments = ("build", corpus, *EMBEDDED, "--k", 3, "--out", place.out)
    assert_refused(place, arguments, CORPUS, r"bad/c\.parquet .*(restore|take it out)")
    # Taken out of the corpus, as the message says, the rest goes through.
    (corpus / "c.parquet").unlink()
    assert run(*arguments)[0] == 0


@pytest.mark.parametrize("corpus", ["gone.parquet", "gone/", "gone/*.parquet", "empty"])
def test_a_corpus_that_is_not_there(place: Place, corpus: str) -> None:
    (place.root / "empty").mkdir()
    (place.root / "empty" / "notes.txt").write_text("no rows")
    arguments = ("build", place.root / corpus, *EMBEDDED, "--out", place.out)
    assert_refused(place, arguments, CORPUS, "does not exist|holds no Parquet|no file matches")


def test_a_uri_that_nothing_reads(place: Place) -> None:
    arguments = ("build", "nosuch://bucket/corpus", *EMBEDDED, "--out", place.out)
    assert_refused(place, arguments, CORPUS, "nosuch://bucket/corpus cannot be opened")


def test_a_corpus_named_twice(place: Place) -> None:
    file = place.root / "good" / "c.parquet"
    arguments = ("build", file, file.parent, *EMBEDDED, "--out", place.out)
    assert_refused(place, arguments, CORPUS, "named twice")


@pytest.mark.parametrize("broken", ["no weights", "no config", "corrupt weights", "no json"])
def test_a_model_folder_that_is_not_whole(place: Place, tiny_model: Path, broken: str) -> None:
    model = place.root / "model"
    shutil.copytree(tiny_model, model)
    if broken == "no weights":
        (model / "model.safetensors").unlink()
    elif broken == "no config":
        (model / "config.json").unlink()
    elif broken == "corrupt weights":
        (model / "model.safetensors").write_bytes(b"\xff" * 64)
    else:
        (model / "config.json").write_text("{")
    corpus = place.write(table())
    arguments = ("build", corpus, "--text-column", "text", "--model", model, "--out", place.out)
    assert_refused(place, arguments, ENCODER, "model")


def test_queries_cannot_come_from_a_model_of_another_width(place: Place, tiny_model: Path) -> None:
    arguments = ("build", place.root / "good", *EMBEDDED, "--model", tiny_model, "--out", place.out)
    assert_refused(place, arguments, CORPUS, "6-dim embeddings and .* gives 32")


@pytest.mark.parametrize("where", ["out", "below out", "store", "no such file system"])
def test_a_file_where_a_folder_is_needed(place: Place, where: str) -> None:
    (place.root / "file").write_text("mine")
    target = {
        "out": ("--out", place.root / "file"),
        "below out": ("--out", place.root / "file" / "deep" / "index"),
        "store": ("--out", place.root / "new", "--store", place.root / "file"),
        "no such file system": ("--out", "/proc/nowhere/index"),
    }[where]
    arguments = ("build", place.root / "good", *EMBEDDED, "--k", 2, *target)
    assert_refused(place, arguments, DISK, "cannot write")
    assert (place.root / "file").read_text() == "mine"


SEARCHES: dict[str, tuple[tuple[Any, ...], int, str]] = {
    "unknown document": (("--like", "d999"), CORPUS, "no document has the id 'd999'"),
    "top-k of 0": (("--like", "d1", "--top-k", "0"), OPTIONS, "--top-k"),
    "nothing asked": ((), OPTIONS, "a text, --queries FILE, --like ID"),
    "two things asked": (("text", "--like", "d1"), OPTIONS, "one of"),
    "text without an encoder": (("text",), OPTIONS, "built from an embedding column"),
    "queries that are gone": (
        ("--queries", "gone.parquet", "--embedding-column", "e", "--run", "r.trec"),
        CORPUS,
        "gone.parquet does not exist",
    ),
    "queries without a run": (("--queries", "q.parquet"), OPTIONS, "--run FILE"),
    "run of no format": (
        ("--queries", "q.parquet", "--embedding-column", "e", "--run", "r.csv"),
        OPTIONS,
        "r.csv names no run format",
    ),
    "run in no folder": (
        ("--queries", "q.parquet", "--embedding-column", "e", "--run", "gone/r.trec"),
        DISK,
        "cannot write .*gone",
    ),
    "run onto a folder": (
        ("--queries", "q.parquet", "--embedding-column", "e", "--run", "folder.trec"),
        DISK,
        "cannot write .*folder.trec",
    ),
    "queries without a column": (
        ("--queries", "q.parquet", "--run", "r.trec"),
        OPTIONS,
        "--embedding-column",
    ),
    "queries of another width": (
        ("--queries", "q.parquet", "--embedding-column", "narrow", "--run", "r.trec"),
        OPTIONS,
        "takes .n, 6. raw embeddings",
    ),
    "queries with NaN": (
        ("--queries", "q.parquet", "--embedding-column", "broken", "--run", "r.trec"),
        CORPUS,
        "NaN or an infinity",
    ),
    "duplicate query ids": (
        (
            *("--queries", "q.parquet", "--embedding-column", "e"),
            *("--id-column", "same", "--run", "r.trec"),
        ),
        CORPUS,
        "more than once",
    ),
    "unknown verify": (("--like", "d1", "--verify", "none"), OPTIONS, "--verify"),
}


@pytest.mark.parametrize("name", list(SEARCHES))
def test_a_search_that_cannot_be_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, status, match = SEARCHES[name]
    queries = pa.table(
        {
            "e": list(numbers(3, rows=2)),
            "narrow": [[1.0], [2.0]],
            "broken": [[1.0] * DIM, [NAN] * DIM],
            "same": ["q", "q"],
        }
    )
    pq.write_table(queries, place.root / "q.parquet")
    (place.root / "folder.trec").mkdir()
    monkeypatch.chdir(place.root)
    assert_refused(place, ("search", place.out, *options), status, match)
    assert not list(place.root.glob("r.*"))


@pytest.fixture(scope="module")
def text_index(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    root = tmp_path_factory.mktemp("texts")
    pq.write_table(table(), root / "c.parquet")
    arguments = ("--text-column", "text", "--model", tiny_model, "--k", 3, "--out", root / "out")
    assert run("build", root / "c.parquet", *arguments)[0] == 0
    return root / "out"


def test_another_encoder_than_the_one_of_the_index(
    tmp_path: Path, text_index: Path, tiny_model: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    status, _, stderr = run("search", text_index, "the cat", "--model", other)
    assert status == ENCODER
    assert_one_error(stderr, match="built with .*gives other embeddings")
    assert run("search", text_index, "the cat", "--model", tiny_model)[0] == 0


def test_a_blank_query(text_index: Path) -> None:
    status, _, stderr = run("search", text_index, "  ")
    assert status == OPTIONS
    assert_one_error(stderr, match="a query is blank")


@pytest.mark.parametrize(
    "name",
    ["index.faiss", "documents.arrow", "whitening.safetensors", "manifest.json", "CURRENT"],
)
@pytest.mark.parametrize("command", ["search", "inspect"])
def test_a_damaged_bundle_and_the_build_that_mends_it(
    place: Place, name: str, command: str
) -> None:
    current = place.out / "CURRENT"
    path = current if name == "CURRENT" else next(place.out.glob(f"versions/*/{name}"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    more = ("--like", "d7") if command == "search" else ()
    status, _, stderr = run(command, place.out, *more)
    assert status == ARTIFACT
    assert_one_error(stderr, match="CURRENT" if path == current else re.escape(str(path)))
    build = ("build", place.root / "good", *EMBEDDED, "--k", 3, "--out", place.out)
    assert run(*build)[0] == 0
    place.assert_unharmed()


def test_a_damaged_store_without_a_corpus_to_mend_it_from(place: Place) -> None:
    path = next((place.out / "store").rglob("embeddings.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    arguments = ("build", "--store", place.out / "store", "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "damaged; run the same encode or build with the")


@pytest.mark.parametrize("store", ["gone", "good"])
def test_a_store_that_is_none(place: Place, store: str) -> None:
    arguments = ("build", "--store", place.root / store, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "holds no store of embeddings")


def test_a_store_of_two_corpora_asks_which(place: Place) -> None:
    corpus = place.write(
        table(id=[f"x{i}" for i in range(ROWS)], e=list(numbers(4))), "b/b.parquet"
    )
    store = place.out / "store"
    status, _, stderr = run("encode", corpus, *EMBEDDED, "--store", store)
    assert status == 0, stderr
    arguments = ("build", "--store", store, "--k", 2, "--out", place.out)
    assert_refused(place, arguments, ARTIFACT, "2 corpora .*good.*name the corpus")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    script = (
        "import pathlib, sys\n"
        "from whiten_index.lock import only_writer\n"
        "with only_writer(pathlib.Path(sys.argv[1]), what='index'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=-1, stdout=-1, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield
    finally:
        process.communicate()


def test_a_second_build_into_the_same_folder_at_once(place: Place) -> None:
    arguments = ("build", place.root / "good", *EMBEDDED, "--k", 2, "--out", place.out)
    with held(place.out):
        assert_refused(place, arguments, BUSY, "is being written by process .*another folder")
    assert run(*arguments)[0] == 0


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# Other sizes fail in other places: embeddings, rows, moments, whitening, FAISS's file, manifest.
@pytest.mark.parametrize("size", [0, 100, 300, 500, 700, 900, 1200, 1800, 3000])
@pytest.mark.parametrize("store", ["filled", "new"])
def test_a_disk_that_takes_no_more(place: Place, size: int, store: str) -> None:
    more = () if store == "filled" else ("--store-dtype", "float16")
    build = ("build", place.root / "good", *EMBEDDED, *more, "--k", "full", "--out", place.out)
    with file_size_limit(size):
        status, stdout, stderr = run(*build)
    assert status == DISK, (stdout, stderr)
    assert_one_error(stderr, match="cannot write .*larger than.*run the same command again")
    place.assert_unharmed()
    assert run(*build)[0] == 0


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 128 kB, where the tests may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or not shutil.which("mount") or subprocess.run(mount).returncode:
        if os.environ.get("CI"):
            pytest.fail("a small disk cannot be mounted: run CI as root, where nothing is skipped")
        pytest.skip("mounting a tmpfs needs root; the file size limit above stands in")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("filling", ["store", "index"])
def test_a_full_disk(place: Place, tiny_disk: Path, filling: str) -> None:
    big = np.random.default_rng(5).standard_normal((2000, 16)).astype(np.float32)
    rows = pa.table({"id": [f"d{i}" for i in range(2000)], "e": list(big)})
    corpus = place.write(rows)
    shutil.copytree(place.out, tiny_disk / "out", ignore=shutil.ignore_patterns("store"))
    on_disk = Place(tiny_disk, place.found)
    store = tiny_disk / "store" if filling == "store" else place.root / "elsewhere"
    build = ("build", corpus, *EMBEDDED, "--k", "full", "--store", store)
    status, stdout, stderr = run(*build, "--out", tiny_disk / "out")
    assert status == DISK, (stdout, stderr)
    assert_one_error(stderr, match=f"cannot write {tiny_disk}.*the disk is full; free space")
    on_disk.assert_unharmed()
    # With room elsewhere the same embeddings are taken up, none is lost.
    status, stdout, _ = run(*build[:-1], place.root / "elsewhere", "--out", place.out, "--json")
    assert status == 0
    assert json.loads(stdout)["rows"] == 2000
