"""Addresses of databases: which there are, and what of one may be shown; options, as text."""

from __future__ import annotations

import ast
import math
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from whiten_index.errors import ConfigError
from whiten_index.vectordb.option_values import (
    first_line,
    one_of,
    real_number,
    require_known,
    whole_number,
    yes_or_no,
)
from whiten_index.vectordb.registry import (
    open_writer,
    require_address,
    require_options,
    shaping_options,
)
from whiten_index.vectordb.row_checks import blocks, new_lease, padded_scores, vectors_array

SECRET = "s3cr3t"


def test_addresses_of_no_database() -> None:
    for address in ("mysql://h", f"postgresql:{SECRET}", f"u:{SECRET}@h", "x.csv", ""):
        with pytest.raises(ConfigError, match=r"no database .*postgresql://.*milvus://") as told:
            open_writer(address, "docs")
        assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    ("address", "told"),
    [
        (
            "localhost:5432/news",
            r"^the address given .* \(postgresql://, qdrant://, lancedb://, milvus://\); "
            r"did you mean postgresql://localhost:5432/news\?$",
        ),
        ("vectors:6333", r"did you mean qdrant://vectors:6333\?$"),
        ("milvus:19530", r"did you mean milvus://milvus:19530\?$"),
        ("http://h:6333", r"did you mean qdrant://h:6333 or milvus://h:6333\?$"),
        (f"http://{SECRET}@h:6333?key={SECRET}", "may be, a secret .* leave it out"),
        (f"http://me:12/{SECRET}@h", "may be, a secret .* leave it out"),
        ("https://h", r"did you mean qdrant\+https://h or milvus\+https://h\?$"),
        ("qdrants://h:6333", r"did you mean qdrant\+https://h:6333\?$"),
        ("qdrnt://h", r"did you mean qdrant://h\?$"),
        ("postgress://me@h/db", r"did you mean postgres://me@h/db\?$"),
        ("pg://me@h/db", r"did you mean postgresql://me@h/db\?$"),
        (f"pgvector://me:{SECRET}@h/db", "leave it out, and set PGPASSWORD"),
        ("postgresql+psycopg://me@h/db", r"did you mean postgresql://me@h/db\?$"),
        ("lance:///data", r"did you mean lancedb:///data\?$"),
        ("s3://bucket/prefix", r"did you mean lancedb\+s3://bucket/prefix\?$"),
        ("s3://bucket/v.parquet", r"; a file is given by its path alone"),
        ("file:///tmp/v.arrow", r"; a file is given by its path alone"),
        ("file:///tmp/v.csv", r"; a file is .* ends in .parquet, .arrow or .npy$"),
        (
            "lancedb:/tmp/x",
            r"^lancedb:/tmp/x is the address of .*; after lancedb: two slashes are missing; "
            r"did you mean lancedb:///tmp/x\?$",
        ),
        (f"lancedb:/key:{SECRET}@bucket", "may be, a secret .* leave it out"),
        (f"qdrant:/x;{SECRET}", r"^the address given .*did you mean qdrant://…\?$"),
        ("milvus:docs.db", r"two slashes are missing; did you mean milvus://…\?$"),
        (f"postgresql:/me:{SECRET}@h/db", "leave it out, and set PGPASSWORD"),
        (f"postgresql:/{SECRET}", r"^the address given .*did you mean postgresql://…\?$"),
        (f"postgres:{SECRET}@h/db", "may be, a secret .* leave it out"),
        (
            "mysql://h/db",
            r"^mysql://h/db is the address of no database that rows can be pushed to; give one of "
            r"postgresql://.*, qdrant://.*, lancedb://.*, milvus://.*, or a file that ends in "
            r".parquet, .arrow or .npy$",
        ),
        ("v.txt", r"^v.txt is the address of no .*; a file ends in .parquet, .arrow or .npy$"),
        ("out/v.csv", r"^out/v.csv is the address of no .*; a file ends in .parquet, .arrow or"),
        ("./v.feather", r"; a file ends in .parquet, .arrow or .npy$"),
        ("vectors", r"^vectors is the address of no .*; give one of .*a file that ends in .parq"),
        ("", r"^the address given is of no .*qdrant:///folder.*TLS qdrant\+https://.*sslmode"),
    ],
)
def test_what_may_be_meant(address: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        require_address(address)
    assert SECRET not in str(caught.value)


CLIENTS = {
    "postgres": ("postgresql://h/db", "psycopg"),
    "qdrant": ("qdrant://h", "qdrant_client"),
    "lancedb": ("lancedb:///data", "lancedb"),
    "milvus": ("milvus://h", "pymilvus"),
}


@pytest.mark.parametrize("extra", CLIENTS)
def test_a_client_that_is_not_there(monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    address, client = CLIENTS[extra]
    monkeypatch.setitem(sys.modules, client, None)
    with pytest.raises(ConfigError, match=rf"not installed.*pip install 'whiten-index\[{extra}\]'"):
        open_writer(address, "docs")


def test_a_client_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One that was built against another release of something fails as it likes."""
    (tmp_path / "psycopg.py").write_text("raise ValueError('size changed')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    told = r"cannot be loaded \(ValueError: size changed\); run pip install --force-reinstall 'w"
    with pytest.raises(ConfigError, match=told):
        open_writer("postgresql://h/db", "docs")


def test_options_are_read_without_a_client() -> None:
    """In a process of its own, since another test may have loaded them."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({[client for _, client in CLIENTS.values()]}))\n"
        "from whiten_index.vectordb.registry import require_options, shaping_options\n"
        f"for address in {[address for address, _ in CLIENTS.values()]}:\n"
        "    given = {} if 'lance' in address else {'m': '8'}\n"
        "    require_options(address, given)\n"
        "    print(shaping_options(address, given))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert [ast.literal_eval(line) for line in done.stdout.splitlines()] == [
        {"index": "hnsw", "m": "8", "ef_construction": "64"},
        {"quantization": "none", "indexing_threshold": "10000", "m": "8"},
        {"index": "auto"},
        {"index": "hnsw", "m": "8", "ef_construction": "200"},
    ]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("address", "given", "same"),
    [
        ("postgresql://h/db", {"m": "16"}, {"ef_construction": "64", "ef_search": "80"}),
        ("postgresql://h/db", {"index": "hnsw"}, {}),
        ("qdrant://h", {"quantization": "none"}, {"indexing_threshold": "10000"}),
        ("lancedb:///data", {"index": "auto"}, {"nprobes": "3"}),
        ("milvus://h", {"m": "16", "ef_construction": "200"}, {"db": "default"}),
    ],
)
def test_a_default_makes_the_same_table_given_or_not(
    address: str, given: dict[str, str], same: dict[str, str]
) -> None:
    require_options(address, given)
    require_options(address, same)
    assert shaping_options(address, given) == shaping_options(address, same)
    assert shaping_options(address, given) == shaping_options(address, {})
    other = "num_partitions" if address.startswith("lancedb") else "m"
    assert shaping_options(address, {**given, other: "5"}) != shaping_options(address, same)


@pytest.mark.parametrize(
    ("address", "index", "more"),
    [
        ("postgresql://h/db", "none", {}),
        ("postgresql://h/db", "ivfflat", {"lists": "7"}),
        ("lancedb:///data", "ivf_pq", {"num_bits": "8"}),
        ("milvus://h", "ivf_flat", {"nlist": "7"}),
        ("milvus://h", "flat", {}),
    ],
)
def test_defaults_of_another_index_are_none_of_a_table(
    address: str, index: str, more: dict[str, str]
) -> None:
    given = {"index": index, **more}
    require_options(address, given)
    assert shaping_options(address, given) == given


@dataclass
class Asked:
    """What the hooks of pytest are given, where tests are asked for by a marker."""

    markexpr: str

    def getoption(self, name: str) -> str:
        return str(vars(self)[name])


def imported(path: Path) -> set[str]:
    """Return the packages that a file imports at its top."""
    found = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found


def test_modules_that_import_clients_are_left_out_unless_asked_for(
    pytestconfig: pytest.Config,
) -> None:
    """They could not even be looked through without the group ``service``."""
    folder = Path(__file__).parents[1]
    # Each is told by its name in the group, or by what that is imported as.
    named = tomllib.loads((folder.parent / "pyproject.toml").read_text())["dependency-groups"]
    group = {re.split(r"[\[>=]", each)[0].replace("-", "_") for each in named["service"]}
    group |= {client for _, client in CLIENTS.values()} | {"haystack", "llama_index"}
    ours = [path for path in sorted(folder.rglob("test_*.py")) if imported(path) & group]
    assert len(ours) >= 8
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(folder / "conftest.py"))
    for expression, left_out in (
        ("not slow and not service", True), ("slow", True), ("service", False), ("", False),
        ("slow or service", False),
    ):  # fmt: skip
        asked = Asked(expression)
        ignored = {conftest.pytest_ignore_collect(path, asked) or False for path in ours}
        assert ignored == {left_out}
        assert not conftest.pytest_ignore_collect(Path(__file__), asked)


def test_options_that_a_database_does_not_have() -> None:
    for address, _ in CLIENTS.values():
        with pytest.raises(ConfigError, match=r"--option odd is unknown to"):
            require_options(address, {"odd": "1"})


def test_numbers() -> None:
    assert whole_number("m", "0", least=0) == 0
    assert whole_number("m", "007") == 7
    assert real_number("days", "1e-3") == 0.001
    for text in ("", "0", "-1", "+1", "1.5", " 1", "1_0", "٣", "9" * 30, "m"):
        with pytest.raises(ConfigError, match=r"--option m takes a whole number from 1 to 9"):
            whole_number("m", text, most=9)
    for text in ("", "nan", "inf", "-0.1", "x"):
        with pytest.raises(ConfigError, match=r"--option days takes a number of 0 or more"):
            real_number("days", text)
    with pytest.raises(ConfigError, match=r"from 1 to 2; '3' was given"):
        real_number("days", "3", least=1, most=2)


def test_words() -> None:
    assert yes_or_no("x", "True")
    assert not yes_or_no("x", "off")
    with pytest.raises(ConfigError, match="takes true or false"):
        yes_or_no("x", "perhaps")
    assert one_of("index", "hnsw", ("hnsw", "none")) == "hnsw"
    with pytest.raises(ConfigError, match="index=flat is unknown; use one of hnsw, none"):
        one_of("index", "flat", ("hnsw", "none"))
    require_known({"m": "1"}, ("m",), "Qdrant")
    with pytest.raises(ConfigError, match="--option n is unknown to Qdrant; use one of m"):
        require_known({"n": "1"}, ("m",), "Qdrant")


def test_secrets_are_hidden_before_a_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "p/ä " * 200
    monkeypatch.setenv("QDRANT_API_KEY", long)
    assert first_line(f"{'x' * 494} {long} tail") == f"{'x' * 494} … tail"[:500]
    assert first_line("  one\ntwo") == "one"
    assert first_line(ValueError("")) == "ValueError"


def test_columns_of_vectors() -> None:
    for dtype, kind in (("f4", pa.float32()), ("f2", pa.float16())):
        made = vectors_array(np.arange(6, dtype=dtype).reshape(2, 3), 3)
        assert made.type == pa.list_(kind, 3)
        assert made.to_pylist() == [[0, 1, 2], [3, 4, 5]]
        assert len(vectors_array(np.empty((0, 3), dtype=dtype), 3)) == 0
    # Columns of another array are not next to each other.
    assert vectors_array(np.arange(8, dtype="f4").reshape(2, 4)[:, ::2], 2).to_pylist() == [
        [0, 2],
        [4, 6],
    ]


def test_scores_and_blocks() -> None:
    made = padded_scores([[0.5, 0.25], [], [1.0]], 2)
    assert made.dtype == "float32"
    assert [[None if math.isnan(each) else each for each in row] for row in made.tolist()] == [
        [0.5, 0.25],
        [None, None],
        [1.0, None],
    ]
    assert padded_scores([], 3).shape == (0, 3)
    assert [list(some) for some in blocks("abcde", 2)] == [["a", "b"], ["c", "d"], ["e"]]
    assert list(blocks([], 2)) == []
    assert new_lease() != new_lease()
