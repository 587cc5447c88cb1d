"""Sweeps inside a database: figures, the answer, and a database left as it was."""

import json
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.bad_input import fails, run, succeed
from tests.helpers.builds import write_rows
from tests.helpers.corpora import write_judged
from tests.measure.sweep_records import points_of
from tests.vectordb.postgres.helpers import connected
from tests.vectordb.pushed_rows import Rows
from whiten_index import SweepConfig, run_sweep
from whiten_index.evaluation.judgements import corpus_file, parquet_corpus, queries_file
from whiten_index.measure.database_sweep import DatabaseSweep
from whiten_index.measure.results import read_sweeps
from whiten_index.vectordb.database_writer import Stored
from whiten_index.vectordb.pushed_table import Layout
from whiten_index.vectordb.registry import open_writer
from whiten_index.vectordb.sqlite_writer import SqliteWriter

DIM, ROWS = 32, 1500


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Embeddings whose first directions have the most variance."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((40, DIM))
    rows = centres[rng.integers(40, size=ROWS)] + 0.8 * rng.standard_normal((ROWS, DIM))
    rows *= np.arange(1, DIM + 1) ** -0.4
    path = tmp_path_factory.mktemp("inside") / "c.parquet"
    write_rows(path, rows.astype(np.float32), id=[f"d{i}" for i in range(ROWS)])
    return path


def asked(corpus: Path, out: Path, *more: Any) -> list[Any]:
    return [
        "sweep", corpus, "--embedding-column", "embedding", "--id-column", "id", "--out", out,
        "--sample", "40", "--transforms", "pca", "--k", "8", *more,
    ]  # fmt: skip


def tables_of(address: str) -> list[str]:
    with connected(address) as connection:
        found = connection.execute("SELECT relname FROM pg_class WHERE relkind = 'r' AND "
                                   "relnamespace = 'public'::regnamespace").fetchall()  # fmt: skip
    return sorted(name for (name,) in found)


@pytest.mark.service
def test_postgresql(corpus: Path, tmp_path: Path, address: str) -> None:
    rows = Rows.make(20)
    with open_writer(address, "docs") as writer:
        rows.fill(writer)
    more = ["--in", address, "--memory-price", "3", "--disk-price", "0.1"]
    said = json.loads(succeed(*asked(corpus, tmp_path / "out", *more, "--json")))
    points = points_of(tmp_path / "out")
    assert said["measured"] == len(points)
    assert {point["codec"] for point in points.values()} == {
        "fp32", "vector", "halfvec", "halfvec-code", "bit-code", "halfvec-bit-code",
    }  # fmt: skip
    raw = points["raw/none/k32/fp32/flat"]
    assert (raw["index_recall@10"], raw["agreement@10"]) == (1, 1)
    # Exact search reads no index.
    assert (raw["bytes"]["per_row"], raw["bytes"]["index"]) == (4 * DIM, 0)
    assert raw["push"] == "--option index=none"
    for key, point in points.items():
        if point is raw:
            continue
        table, index = point["bytes"]["table"], point["bytes"]["index"]
        assert table > 4 * point["k"] / (2 if "dtype float16" in point["push"] else 1)
        assert index > point["bytes"]["per_row"]
        low, high = point["intervals"]["agreement@10"]
        assert low <= point["agreement@10"] <= high
        for latency in (point["latency_ms"], point["latency_ms_many"]):
            assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"]
        assert point["latency_ms_many"]["clients"] == 8
        assert point["memory"]["build"] > 0
        if "bit" not in key and "ef_search 200" in key:
            assert point["index_recall@10"] > 0.95
    # The table that was there stays, and nothing else.
    assert tables_of(address) == ["docs"]
    # Other prices need no other measurement.
    for memory in (3, 5):
        more[3] = str(memory)
        again = json.loads(succeed(*asked(corpus, tmp_path / "out", *more, "--json")))
        assert (again["measured"], again["found"]) == (0, len(points))
        (sweep,) = read_sweeps(tmp_path / "out" / "results.jsonl")
        for key, measured in sweep.by_key.items():
            table, index = points[key]["bytes"]["table"], points[key]["bytes"]["index"]
            price = 1e-3 * (memory * (index or table) + 0.1 * (index + table))
            assert measured.number("dollars") == pytest.approx(price)


@pytest.mark.service
def test_the_commands_of_the_report_can_be_run(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = tmp_path / "l"
    more = ["--in", f"lancedb://{database}", "--codecs", "float16,rq1,sq"]
    succeed(*asked(corpus, tmp_path / "out", *more))
    assert not list(database.glob("whiten_sweep*"))
    report = (tmp_path / "out" / "report.md").read_text()
    head = re.search(r"\| a row.*\n.*\n((?:\| .*\n)+)", report)
    assert head is not None
    budgets = [f"{n} bytes of code" for n in (64, 128, 256, 512)]
    budgets += [f"{n} bytes of table and index" for n in ("512", "1,024", "2,048")]
    for budget, line in zip(budgets, head[1].splitlines(), strict=True):
        cells = line.split(" | ")
        assert cells[0] == f"| {budget}"
        assert sum("**" in cell for cell in cells) == 1
        assert all("bytes" in cell for cell in cells[1:])
    commands = [line for line in report.splitlines() if line.startswith("whiten-index build")]
    assert len(commands) == len(budgets)
    monkeypatch.chdir(tmp_path)
    for command in commands[-1].split(" && "):
        succeed(*shlex.split(command)[1:])
    with open_writer(f"lancedb://{database}", "TABLE") as writer:
        assert writer.count() == ROWS
    assert "Best at equal bytes" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    ("address", "codecs"),
    [("duckdb://{}/d.duckdb", {"fp32", "float32"}),
     ("sqlite://{}/s.db", {"fp32", "float32", "bit"})],
)  # fmt: skip
def test_a_file(corpus: Path, tmp_path: Path, address: str, codecs: set[str]) -> None:
    """Eight clients read it while the sweep has it open; an index or a code finds nearly all."""
    place = address.format(tmp_path)
    succeed(*asked(corpus, tmp_path / "out", "--in", place))
    points = points_of(tmp_path / "out")
    assert {point["codec"] for point in points.values()} == codecs
    for key, point in points.items():
        assert point["bytes"]["table"] > 4 * point["k"]
        assert point["index_recall@10"] >= (0.3 if "/bit/" in key else 0.95)
        assert point["latency_ms_many"]["clients"] == 8
    with open_writer(place, "docs") as writer:
        writer.discard()
        assert writer.published() is None


def test_numbers_that_are_no_half_are_not_measured(tmp_path: Path) -> None:
    rows = 1e5 * np.random.default_rng(0).standard_normal((200, DIM)).astype(np.float32)
    write_rows(tmp_path / "c.parquet", rows)
    wishes = {"similarity": "dot", "databases": (f"lancedb://{tmp_path}/l",)}
    config = SweepConfig(
        corpus=(str(tmp_path / "c.parquet"),), embedding_column="embedding", id_column="id",
        out=str(tmp_path / "out"), widths="8", sample=30, transforms="pca",
        codecs="float32,float16", **wishes,
    )  # fmt: skip
    skipped = run_sweep(config).skipped
    assert {point["codec"] for point in points_of(tmp_path / "out").values()} == {"fp32", "float32"}
    assert skipped
    assert all("beyond 65,504" in why for why in skipped.values())


def test_a_disk_that_fails_is_no_property_of_a_form(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: SqliteWriter, held: Stored, layout: Layout) -> None:
        if held.table.k == DIM:
            raise sqlite3.OperationalError("disk I/O error")
        build(writer, held, layout)

    build, out = SqliteWriter._build, tmp_path / "out"
    both = ("--in", f"sqlite://{tmp_path}/s.db", "--in", f"duckdb://{tmp_path}/d.duckdb")
    sweep = asked(corpus, out, *both, "--codecs", "float32")
    with monkeypatch.context() as failing:
        failing.setattr(SqliteWriter, "_build", fail)
        fails(10, "points were not measured", *sweep)
    assert {point["k"] for point in points_of(out).values()} == {8, DIM}
    said = json.loads(succeed(*sweep, "--json"))
    assert (said["measured"], said["skipped"]) == (1, {})


@pytest.mark.service
def test_a_form_that_the_engine_refuses_is_left_out(corpus: Path, tmp_path: Path) -> None:
    more = ["--in", f"milvus://{tmp_path}/m.db", "--codecs", "sq,rabitq", "--no-baselines"]
    said = json.loads(succeed(*asked(corpus, tmp_path / "out", *more, "--json")))
    assert {point["codec"] for point in points_of(tmp_path / "out").values()} == {"sq"}
    assert said["skipped"]
    assert all("rabitq" in key for key in said["skipped"])


@pytest.mark.service
@pytest.mark.parametrize("kill", [signal.SIGTERM, signal.SIGKILL])
def test_a_sweep_that_is_ended(
    corpus: Path, tmp_path: Path, address: str, kill: signal.Signals
) -> None:
    more = ["--in", address, "--codecs", "halfvec", "--no-baselines"]
    command = [str(each) for each in asked(corpus, tmp_path / "out", *more)]
    starting = "from whiten_index.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", starting, *command], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as child:  # fmt: skip
        while not tables_of(address):
            assert child.poll() is None
        child.send_signal(kill)
    assert child.returncode != 0
    if kill is signal.SIGTERM:
        assert tables_of(address) == []
    # What a kill left is removed by the same sweep, and its points are measured.
    succeed(*command)
    assert tables_of(address) == []
    assert len(points_of(tmp_path / "out")) == 3


@pytest.mark.service
def test_judged_passages(tmp_path: Path, tiny_words: Any, tiny_model: Path, address: str) -> None:
    folder = write_judged(tmp_path / "one", tiny_words)
    corpus = parquet_corpus(corpus_file(folder), tmp_path / "corpora")
    succeed(
        "sweep", corpus, "--text-column", "title", "--text-column", "text", "--id-column", "id",
        "--model", tiny_model, "--out", tmp_path / "out", "--queries", queries_file(folder),
        "--qrels", folder / "qrels" / "test.tsv", "--k", "16", "--transforms", "truncate",
        "--passage-tokens", "8", "--overlap", "0", "--in", address, "--codecs", "vector",
    )  # fmt: skip
    points = points_of(tmp_path / "out")
    raw = points["raw/none/k32/fp32/flat"]
    assert raw["intervals"]["ndcg@10_to_raw"] == [0, 0]
    assert raw["quality"]["ndcg@10"] > 0.3
    for point in points.values():
        low, high = point["intervals"]["quality.ndcg@10"]
        assert low <= point["quality"]["ndcg@10"] <= high


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (["--in", "nothing://here"], "is the address of no database"),
        (["--in", "x.parquet"], "is the address of no database"),
        (["--in", "lancedb:///l", "--indexes", "flat"], "--indexes is of indexes of FAISS"),
        (["--in", "lancedb:///l", "--rerank", "50"], "--rerank is of indexes of FAISS"),
        (["--in", "lancedb:///l", "--codecs", "sq8", "--plan"], "use float16, float32"),
        (["--in", "postgresql://me:secret@here/db"], "secret"),
    ],
)
def test_options_that_do_not_fit(corpus: Path, tmp_path: Path, more: list[str], text: str) -> None:
    status, _, error = run(*asked(corpus, tmp_path / "out", *more))
    assert status == 2
    assert text in error
    assert "secret@" not in error
    assert not (tmp_path / "out").exists()


def test_a_plan_asks_no_database(corpus: Path, tmp_path: Path) -> None:
    more = ["--in", "postgresql://nowhere.invalid/db", "--plan", "--json"]
    planned = json.loads(succeed(*asked(corpus, tmp_path / "out", *more)))
    # Three searches of each of five forms, raw and of eight directions, and an exact one.
    assert planned["points"] == 31
    both = ["--in", "postgresql://nowhere.invalid/db", "--in", "lancedb:///nowhere", "--codecs"]
    more = [*both, "bit-code,float16", "--no-baselines", "--plan", "--json"]
    planned = json.loads(succeed(*asked(corpus, tmp_path / "out", *more)))
    assert planned["points"] == 3 + 1
    assert not (tmp_path / "out").exists()


def test_sweeps_of_several_folders_share_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for place in "ab":
        (tmp_path / place).mkdir()
        monkeypatch.chdir(tmp_path / place)
        config = SweepConfig(out="out", store=str(tmp_path), databases=("lancedb:///l",))
        names.add(DatabaseSweep(config, "lancedb:///l").table)
    assert len(names) == 2


def test_exact_search_of_wide_vectors_reads_no_codes(tmp_path: Path) -> None:
    config = SweepConfig(out=str(tmp_path), databases=("postgresql://here/db",), widths=("64",))
    inside = DatabaseSweep(config, "postgresql://here/db")
    settings, _ = inside.settings(dim=5000, rank=5000, rows=2000)
    wide = {each.name: str(each.code) for each in settings if each.space[0] == "raw"}
    assert wide.keys() == {"fp32", "bit-code", "halfvec-bit-code"}
    assert wide["fp32"] == "--option index=none"


@pytest.mark.service
def test_an_engine_without_codes(corpus: Path, tmp_path: Path) -> None:
    fails(2, "nothing to sweep", *asked(corpus, tmp_path / "out", "--in", f"qdrant://{tmp_path}/q"))


@pytest.fixture(autouse=True)
def few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whiten_index.measure.database_sweep._SECONDS", 0.05)
