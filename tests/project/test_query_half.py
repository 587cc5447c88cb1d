"""Programs of docs/query-half reduce the twenty vectors there as this package does."""

import re
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open

from tests.project.test_deploy import tool
from tests.vectordb.postgres.helpers import connected

HERE = Path(__file__).parents[2] / "docs" / "query-half"
FILES = ("transform.safetensors", "vectors.csv")
K = 4


def read_rows() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the embeddings (20, 16) and what they become (20, 4)."""
    rows = np.loadtxt(HERE / "vectors.csv", delimiter=",")
    return rows[:, :-K], rows[:, -K:]


def assert_reduced(found: Any) -> None:
    np.testing.assert_allclose(np.array(found, float), read_rows()[1], rtol=0, atol=1e-6)


def test_the_rule_of_the_page() -> None:
    with safe_open(HERE / FILES[0], "numpy") as file:
        matrix, bias = (file.get_tensor(name).astype(float) for name in ("matrix", "bias"))
        facts = file.metadata()
    assert (facts["normalize_input"], facts["similarity"]) == ("false", "cosine")
    found = read_rows()[0] @ matrix + bias
    assert_reduced(found / np.linalg.norm(found, axis=1, keepdims=True))
    assert f"query digest {facts['query_digest']};" in (HERE / "whiten.sql").read_text()


@pytest.mark.parametrize(
    ("program", "package", "command"),
    [
        ("node", "nodejs", "node reduce.js"),
        ("go", "golang-go", "go run reduce.go"),
        ("java", "default-jdk-headless", "java Reduce.java"),
        ("rustc", "rustc", "{}/reduce"),
    ],
)
def test_programs(program: str, package: str, command: str, tmp_path: Path) -> None:
    tool(program, package=package)
    if program == "rustc":
        made = ("-o", tmp_path / "reduce")
        subprocess.run(
            ["rustc", "--edition", "2021", "-O", "reduce.rs", *made], cwd=HERE, check=True
        )
    words = [*command.format(tmp_path).split(), *FILES]
    run = subprocess.run(words, cwd=HERE, check=True, capture_output=True, text=True)
    digest, *lines = run.stdout.splitlines()
    with safe_open(HERE / FILES[0], "numpy") as file:
        assert digest == file.metadata()["query_digest"]
    assert_reduced([line.split(",") for line in lines])
    source = HERE / next(word for word in (*command.split(), "reduce.rs") if "educe." in word)
    assert len(source.read_text().splitlines()) <= 60


def test_macros_of_duckdb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    (code,) = re.findall(r"```python\n(.*?)```", (HERE / "index.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    database: duckdb.DuckDBPyConnection = names["db"]
    ask = "SELECT whiten(?::DOUBLE[])"
    found = [database.execute(ask, [row.tolist()]).fetchone() for row in read_rows()[0]]
    assert_reduced([row[0] for row in found if row is not None])


@pytest.mark.service
def test_the_function_of_postgresql(address: str) -> None:
    ask = "SELECT whiten(%s::vector)::real[]"
    with connected(address) as database:
        database.execute((HERE / "whiten.sql").read_text())
        found = [database.execute(ask, [str(row.tolist())]).fetchone() for row in read_rows()[0]]
    assert_reduced([row[0] for row in found if row is not None])
