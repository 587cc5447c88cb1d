"""The command line: what it prints, what it exits with, what it loads."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

import whiten_index
from tests.bad_input_helpers import (
    EMBEDDED,
    one_object,
    process,
    run,
    run_build_job,
    succeed,
    write_job,
)
from whiten_index import open_index
from whiten_index.whitening import Whitening

ROWS, DIM = 120, 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    rows = np.random.default_rng(0).standard_normal((ROWS, DIM)) * np.linspace(1, 3, DIM)
    table = pa.table(
        {
            "id": [f"d{i}" for i in range(ROWS)],
            "e": list(rows.astype(np.float32)),
            "score": ["high" if i % 2 else "low" for i in range(ROWS)],
            "row": [-i for i in range(ROWS)],
            "when": pa.array(range(ROWS), pa.timestamp("s")),
        }
    )
    pq.write_table(table, folder / "c.parquet")
    return folder / "c.parquet"


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    out = tmp_path_factory.mktemp("index") / "out"
    succeed("build", corpus, *EMBEDDED, "--k", 4, "--out", out, "--shard-rows", 50)
    return out


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["build", "--help"], ["search", "-h"], ["update", "--help"], ["--version"]],
)
def test_help_takes_less_than_half_a_second_of_cpu_and_loads_nothing(arguments: list[str]) -> None:
    code = (
        "import atexit, resource, sys\n"
        "def end():\n"
        "    heavy = {'torch', 'transformers', 'faiss', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    print(used.ru_utime + used.ru_stime, *heavy, file=sys.stderr)\n"
        "atexit.register(end)\n"
        "from whiten_index.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0
    seconds, *heavy = done.stderr.split()
    assert not heavy
    assert float(seconds) < 0.5
    if arguments == ["--version"]:
        assert whiten_index.__version__ in done.stdout
    else:
        assert done.stdout.startswith("Usage: ")


def test_the_installed_command_is_the_same_program() -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="whiten-index")
    assert script.value == "whiten_index.cli:main"


def test_build_prints_one_object_with_what_is_documented(tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "out"
    report = one_object(succeed("build", corpus, *EMBEDDED, "--k", 4, "--out", out, "--json"))
    counts = report["counts"]
    assert {"read", "encoded", "reused", "truncated", "skipped"} <= set(counts)
    assert counts["read"] == ROWS == counts["encoded"] + sum(counts["skipped"].values())
    whitening = {"kind", "k", "exponent", "center", "rank", "condition_number"}
    assert whitening <= set(report["whitening"])
    assert report["whitening"]["k"] == 4
    assert report["bytes"]["raw"] == ROWS * DIM * 4
    assert report["bytes"]["vectors"] == ROWS * 4 * 4
    version = out / "versions" / report["version"]
    assert report["bytes"]["index_file"] == (version / "index.faiss").stat().st_size
    assert all(seconds >= 0 for seconds in report["seconds"].values())
    assert report["store"] == str(out / "store")
    again = one_object(succeed("build", corpus, *EMBEDDED, "--k", 4, "--out", out, "--json"))
    assert (again["version"], again["up_to_date"]) == (report["version"], True)
    assert again["counts"]["reused"] == ROWS


@pytest.mark.parametrize(
    "more", [("--factory", "IVF4,Flat"), ("--whiten", "none"), ("--threads", "1")]
)
def test_a_process_prints_one_object_and_libraries_print_nothing_beside_it(
    tmp_path: Path, corpus: Path, more: tuple[str, ...]
) -> None:
    k = () if "none" in more else ("--k", "4")
    started = process("build", corpus, *EMBEDDED, *k, *more, "--out", tmp_path / "o", "--json")
    stdout, stderr = started.communicate(timeout=60)
    assert started.returncode == 0, stderr
    assert one_object(stdout)["counts"]["read"] == ROWS


def test_inspect_prints_what_the_build_said(index: Path) -> None:
    fields = one_object(succeed("inspect", index, "--json"))
    assert {"counts", "whitening", "bytes", "seconds", "version", "spectrum", "config"} <= set(
        fields
    )
    assert fields["counts"]["read"] == fields["rows"] == ROWS
    text = succeed("inspect", index)
    for fact in (fields["version"], "rank 8", "8 -> 4 dims", "Flat", "variance kept"):
        assert fact in text


@pytest.mark.parametrize("unit", [False, True])
def test_export_writes_the_transform_as_one_matrix_and_bias(
    tmp_path: Path, corpus: Path, unit: bool
) -> None:
    out, file = tmp_path / "out", tmp_path / "w.safetensors"
    normalize = ("--normalize-input",) if unit else ()
    whiten = ("--whiten", "whitening", "--k", 4)
    succeed("build", corpus, *EMBEDDED, *whiten, *normalize, "--out", out)
    facts = one_object(succeed("export", out, file, "--json"))
    assert facts.keys() == {"file", "dim", "k", "normalize_input", "error", "query_digest"}
    assert facts["file"] == str(file)
    assert (facts["dim"], facts["k"], facts["normalize_input"]) == (DIM, 4, unit)
    exported = load_file(file)
    matrix, bias = exported["matrix"], exported["bias"]
    assert matrix.dtype == bias.dtype == np.float32
    assert (matrix.shape, bias.shape) == ((DIM, 4), (4,))
    rows = np.stack(pq.read_table(corpus)["e"].to_pylist())
    (path,) = out.glob("versions/*/whitening.safetensors")
    expected = Whitening.load(path).apply(rows)
    x = rows / np.linalg.norm(rows, axis=1, keepdims=True) if unit else rows
    found = x.astype(np.float32) @ matrix + bias
    missed = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert 0 < missed <= facts["error"] < 1e-5
    assert exported["error"] == pytest.approx(facts["error"])
    text = succeed("export", out, file)
    embeddings = "embeddings of unit length" if unit else "raw embeddings"
    assert text.startswith(f"{file}: matrix {DIM} x 4 and bias, for {embeddings}\n")
    assert f"{facts['error']:.1e}" in text


@pytest.mark.parametrize("name", ["w.npz", "w", "w.safetensors.bak", "w.SAFETENSORS"])
def test_export_to_another_ending_is_refused(tmp_path: Path, index: Path, name: str) -> None:
    status, stdout, stderr = run("export", index, tmp_path / name)
    assert (status, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("Error: ")
    assert ".safetensors" in stderr
    assert name in stderr
    assert not list(tmp_path.iterdir())


def test_export_into_a_folder_that_is_missing_is_an_output_error(
    tmp_path: Path, index: Path
) -> None:
    path = tmp_path / "none" / "w.safetensors"
    status, stdout, stderr = run("export", index, path)
    assert (status, stdout) == (7, "")
    assert f"Error: cannot write {path}" in stderr
    assert not path.parent.exists()


def test_export_of_what_is_no_index_writes_nothing(tmp_path: Path) -> None:
    status, _, stderr = run("export", tmp_path / "none", tmp_path / "w.safetensors")
    assert status == 5
    assert "Error: " in stderr
    assert not list(tmp_path.iterdir())


def test_encode_prints_one_object_and_build_takes_its_store(tmp_path: Path, corpus: Path) -> None:
    store = tmp_path / "store"
    report = one_object(succeed("encode", corpus, *EMBEDDED, "--store", store, "--json"))
    assert (report["counts"]["encoded"], report["rows"]) == (ROWS, ROWS)
    assert report["bytes"]["raw"] == ROWS * DIM * 4
    out = tmp_path / "out"
    built = one_object(succeed("build", "--store", store, "--k", 4, "--out", out, "--json"))
    assert (built["counts"]["encoded"], built["counts"]["reused"]) == (0, ROWS)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_plan_foretells_the_build_and_writes_nothing(tmp_path: Path, dtype: type) -> None:
    rows = np.random.default_rng(1).standard_normal((50, DIM)).astype(dtype)
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"id": range(50), "e": list(rows)}), path)
    out = tmp_path / "out"
    arguments = ("build", path, *EMBEDDED, "--k", 4, "--out", out, "--json")
    plan = one_object(succeed(*arguments, "--plan"))
    assert not out.exists()
    report = one_object(succeed(*arguments))
    assert (plan["read"], plan["reused"], plan["to_encode"]) == (50, 0, 50)
    assert plan["raw_bytes"] == report["bytes"]["raw"] == rows.nbytes
    assert plan["vector_bytes"] == report["bytes"]["vectors"]
    assert (plan["factory"], plan["k"]) == ("Flat", 4)
    after = one_object(succeed(*arguments, "--plan"))
    assert (after["reused"], after["to_encode"]) == (50, 0)
    assert "nothing was written" in succeed(*arguments[:-1], "--plan")


def test_plan_measures_the_encoder(tmp_path: Path, tiny_model: Path) -> None:
    path = tmp_path / "c.parquet"
    pq.write_table(pa.table({"text": [f"the cat {i}" for i in range(40)] + [" "]}), path)
    arguments = ("--text-column", "text", "--model", tiny_model, "--store", tmp_path / "store")
    plan = one_object(succeed("encode", path, *arguments, "--plan", "--json"))
    assert (plan["read"], plan["to_encode"], plan["dim"]) == (41, 40, 32)
    assert plan["rows_per_second"] > 0
    assert plan["seconds"] == pytest.approx(40 / plan["rows_per_second"])
    assert plan["raw_bytes"] == 40 * 32 * 2
    assert not (tmp_path / "store").exists()


def test_search_says_what_python_says(index: Path) -> None:
    expected = open_index(index).search_like("d7", top_k=5)
    found = one_object(succeed("search", index, "--like", "d7", "--top-k", 5, "--json"))
    (result,) = found["results"]
    assert result["query"] == "d7"
    assert [hit["id"] for hit in result["hits"]] == [hit.id for hit in expected]
    assert [hit["score"] for hit in result["hits"]] == pytest.approx([h.score for h in expected])
    lines = succeed("search", index, "--like", "d7", "--top-k", 5).splitlines()
    assert [line.split()[1] for line in lines[1:]] == [hit.id for hit in expected]


def test_a_kept_column_hides_neither_score_nor_row(tmp_path: Path, corpus: Path) -> None:
    out = tmp_path / "out"
    kept = ("--keep", "score", "--keep", "row", "--keep", "when")
    succeed("build", corpus, *EMBEDDED, "--k", 4, *kept, "--out", out)
    (result,) = one_object(succeed("search", out, "--like", "d7", "--json"))["results"]
    expected = open_index(out).search_like("d7")
    for hit, truth in zip(result["hits"], expected, strict=True):
        assert hit["id"] == truth.id
        assert hit["score"] == pytest.approx(truth.score)
        assert hit["row"] == truth.row
        assert "low" in json.dumps(hit) or "high" in json.dumps(hit)


@pytest.mark.parametrize("suffix", ["trec", "jsonl", "parquet"])
def test_search_writes_a_run(tmp_path: Path, index: Path, corpus: Path, suffix: str) -> None:
    path = tmp_path / f"run.{suffix}"
    arguments = ("--queries", corpus, *EMBEDDED, "--top-k", 3, "--run", path)
    report = one_object(succeed("search", index, *arguments, "--json"))
    assert report == {"run": str(path), "queries": ROWS, "top_k": 3}
    if suffix == "trec":
        assert len(path.read_text().splitlines()) == 3 * ROWS
        assert re.fullmatch(r"d0 Q0 d0 1 \S+ \S+", path.read_text().splitlines()[0])


@pytest.fixture(scope="module")
def text_index(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    texts = [f"the cat sat on mat {i}" for i in range(20)] + ["moon\nstar"]
    pq.write_table(pa.table({"id": range(21), "text": texts}), folder / "c.parquet")
    arguments = ("--text-column", "text", "--id-column", "id", "--keep", "text", "--k", 3)
    out = folder / "out"
    succeed("build", folder / "c.parquet", *arguments, "--model", tiny_model, "--out", out)
    return out


def test_every_text_asked_gets_its_answer(text_index: Path) -> None:
    asked = ["moon star", "the cat", "moon star"]
    found = one_object(succeed("search", text_index, *asked, "--top-k", 2, "--json"))["results"]
    assert [result["query"] for result in found] == asked
    first, _, again = ([hit["id"] for hit in result["hits"]] for result in found)
    assert first == again
    expected = open_index(text_index, device="cpu").search(asked[:2], top_k=2)
    assert [[h["id"] for h in result["hits"]] for result in found[:2]] == [
        [hit.id for hit in hits] for hits in expected
    ]
    lines = succeed("search", text_index, "moon star", "--top-k", 2).splitlines()
    # A text of two lines is shown on one.
    assert len(lines) == 3


def test_truncated_texts_are_counted(tmp_path: Path, tiny_model: Path) -> None:
    texts = ["cat " * 5, "cat " * 6, "cat " * 7, "cat " * 50, "dog"]
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    arguments = ("--text-column", "text", "--model", tiny_model, "--max-length", 8, "--json")
    out = ("--store", tmp_path / "store")
    first = one_object(succeed("encode", tmp_path / "c.parquet", *arguments, *out))
    # Eight tokens are two special ones and six words.
    assert first["counts"]["truncated"] == 2
    again = one_object(succeed("encode", tmp_path / "c.parquet", *arguments, *out))
    assert (again["counts"]["truncated"], again["counts"]["reused"]) == (2, 5)


def test_a_job_file_gives_defaults_that_flags_override(tmp_path: Path, corpus: Path) -> None:
    job = write_job(tmp_path / "job.toml", corpus, tmp_path / "out", more='keep = "when"\n')
    first = one_object(succeed("build", "--config", job, "--json"))
    assert (first["whitening"]["k"], first["whitening"]["center"]) == (3, False)
    config = one_object(succeed("inspect", tmp_path / "out", "--json"))["config"]
    assert (config["shard_rows"], config["keep"]) == (40, ["when"])
    flags = ("--k", "5", "--center", "--out", tmp_path / "other")
    for arguments in (("--config", job, *flags), (*flags, "--config", job)):
        other = one_object(succeed("build", *arguments, "--json"))
        assert (other["whitening"]["k"], other["whitening"]["center"]) == (5, True)
        assert other["out"] == str(tmp_path / "other")
    encoded = succeed("encode", "--config", job, "--store", tmp_path / "store", "--json")
    assert one_object(encoded)["counts"]["read"] == ROWS


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kk = 3", "sets 'kk', which is unknown; known are .*, k, "),
        ("[build]\nk = 3", "sets 'build', which is unknown"),
        ("k = ", "is not TOML"),
        ("limit = 'many'", "limit"),
        ("whiten = 'bleach'", "auto.*none.*pca"),
        ("k = []", r"k .*\[\]"),
        ("filter = 3", "filter"),
        ("exponent = 'soft'", "exponent"),
        ("text-column = 3", "text.column"),
    ],
)
@pytest.mark.parametrize("face", ["build", "pipeline"])
def test_a_job_file_that_cannot_be_used(
    tmp_path: Path, corpus: Path, text: str, match: str, face: str
) -> None:
    job = tmp_path / "job.toml"
    known = json.dumps(str(corpus)), json.dumps(str(tmp_path / "out"))
    job.write_text(f"corpus = {known[0]}\nout = {known[1]}\nembedding_column = 'e'\n{text}\n")
    if face == "build":
        status, _, stderr = run("build", "--config", job)
        last = stderr.splitlines()[-1]
        assert last.startswith("Error: ")
    else:
        status, events = run_build_job(job)
        assert events[-1]["event"] == "failed"
        last = events[-1]["message"]
    assert status == 2
    assert re.search(match, last)
    assert not (tmp_path / "out" / "CURRENT").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "job.toml cannot be read .*; check the path"),
        (b"\xff\xfe", "job.toml is not UTF-8 .*; save it as UTF-8"),
    ],
)
def test_a_job_file_that_cannot_be_read(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "job.toml").write_bytes(content)
    status, _, stderr = run("build", "--config", tmp_path / "job.toml")
    assert status == 2
    assert re.search(message, stderr.splitlines()[-1])


def test_the_closing_table_shows_every_count(tmp_path: Path) -> None:
    rows: list[Any] = list(np.random.default_rng(2).standard_normal((1500, 3)))
    rows[4] = None
    pq.write_table(pa.table({"e": rows}), tmp_path / "c.parquet")
    out = tmp_path / "out"
    text = succeed(
        "build", tmp_path / "c.parquet", "--embedding-column", "e", "--out", out, "--k", 2
    )
    shown = {tuple(line.rsplit(maxsplit=1)) for line in text.splitlines() if len(line.split()) > 1}
    for line in (
        ("  read", "1,500"),
        ("  encoded", "1,499"),
        ("  reused", "0"),
        ("  skipped", "1"),
        ("    null_embedding", "1"),
    ):
        assert (line[0], line[1]) in {(name.rstrip(), value) for name, value in shown}
    assert f"raw embeddings: {out / 'store'}" in text
    assert "rows/s" in text
    assert "\r" not in text


def test_progress_bars_are_for_terminals_only(tmp_path: Path, corpus: Path) -> None:
    arguments = ("build", corpus, *EMBEDDED, "--k", 4, "--out", tmp_path / "out")
    _, stdout, stderr = run(*arguments)
    assert stderr == ""
    assert "%|" not in stdout
