"""The command line: what it prints, what it exits with, what it loads."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.helpers.bad_input import fails, run, succeed

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


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["build", "--help"], ["search", "-h"], ["update", "--help"], ["--version"]],
)
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import atexit, sys\n"
        "def end():\n"
        "    heavy = {'torch', 'transformers', 'faiss', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "    print(*heavy, file=sys.stderr)\n"
        "atexit.register(end)\n"
        "from whiten_index.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0
    assert not done.stderr.split()
    if arguments == ["--version"]:
        assert whiten_index.__version__ in done.stdout
    else:
        assert done.stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("words", "missing", "marked"),
    [
        ("build", "--text-column or --embedding-column, --store or CORPUS, --out", 3),
        ("build --store s", "--out", 3),
        ("build c --out o", "--text-column or --embedding-column", 3),
        ("encode", "CORPUS, --text-column or --embedding-column, --store", 2),
        ("sweep c", "--out, --text-column or --embedding-column", 3),
        ("search", "INDEX, --queries or --like or TEXT", 0), ("export", "INDEX, TARGET", 0),
        ("push", "INDEX, --to", 1), ("prune", "INDEX, --keep", 1), ("train", "CORPUS, --out", 1),
    ],
)  # fmt: skip
def test_all_that_is_missing_is_told_at_once_and_in_the_help(
    words: str, missing: str, marked: int
) -> None:
    status, _, stderr = run(*words.split())
    assert (status, stderr.splitlines()[-1]) == (2, f"Error: missing: {missing}")
    assert len(re.findall(r"[\[ ]required[\] ]", succeed(words.split()[0], "--help"))) == marked


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("kk = 3", "kk is unknown; .*nown are .*, k, "), ("[build]\nk = 3", "build is unknown; "),
        ("n" * 99 + " = 3", "n{80}[.]{3} is unknown"), ("filter = 3", "filter"),
        ("k = ", "is not TOML"), ("limit = 'many'", "limit"),
        ("whiten = 'bleach'", "auto.*none.*pca"), ("k = []", r"k .*\[\]"),
        ("exponent = 'soft'", "exponent"), ("text-column = 3", "text.column"),
    ],
)  # fmt: skip
def test_a_job_file_that_cannot_be_used(
    tmp_path: Path, corpus: Path, text: str, match: str
) -> None:
    job = tmp_path / "job.toml"
    known = json.dumps(str(corpus)), json.dumps(str(tmp_path / "out"))
    job.write_text(f"corpus = {known[0]}\nout = {known[1]}\nembedding_column = 'e'\n{text}\n")
    status, _, stderr = run("build", "--config", job)
    last = stderr.splitlines()[-1]
    assert last.startswith("Error: ")
    assert status == 2
    assert re.search(match, last)
    assert not (tmp_path / "out" / "CURRENT").exists()


def test_an_evaluation_takes_one_width_and_refuses_a_transform_of_builds(tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("sentence1\tsentence2\tscore\n")
    job.write_text("k = 4\n")
    assert run("eval", "sts", "--config", job, pairs)[0] == 3
    job.write_text("whiten = 'auto'\n")
    fails(2, "'auto' is not one of", "eval", "sts", "--config", job, pairs)


def test_embeddings_need_no_torch_and_what_lacks_a_package_names_the_extra(published: Path) -> None:
    names = ("torch", "onnxruntime", "transformers", "sklearn")
    blocked = f"import sys; sys.modules |= dict.fromkeys({names})\n"

    def ended(code: str, *arguments: object) -> tuple[int, str]:
        command = [sys.executable, "-c", blocked + code, *map(str, arguments)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        return done.returncode, done.stderr

    main = "from whiten_index.cli import main; main()"
    assert ended(main, "search", published / "out", "--like", "d1")[0] == 0
    told = ended(main, "search", published / "out", "a cat")[1]
    assert "cannot encode text; search with --like or with embeddings (--queries and --em" in told
    encode = ("encode", published / "good", "--text-column", "text", "--store", published / "s")
    for code, arguments in (
        (main, encode),
        ("from whiten_index import load_encoder; load_encoder()", ()),
    ):
        status, stderr = ended(code, *arguments)
        assert status
        assert "needs torch and transformers; run: pip install 'whiten-index[encode]'" in stderr
    _, stderr = ended("from whiten_index import WhitenedTransformer")
    assert "needs sklearn; run: pip install 'whiten-index[scikit-learn]'" in stderr
