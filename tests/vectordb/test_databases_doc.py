"""docs/databases.md names every option that there is, and no other."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from whiten_index.cli.push_command import push
from whiten_index.errors import ConfigError
from whiten_index.vectordb.lance import options as lance
from whiten_index.vectordb.milvus import options as milvus
from whiten_index.vectordb.postgres import options as postgres
from whiten_index.vectordb.qdrant import options as qdrant

DOC = Path(__file__).parents[2] / "docs" / "databases.md"


def section(title: str) -> str:
    (found,) = re.findall(rf"^## {title}.*?(?=^## |\Z)", DOC.read_text(), re.M | re.S)
    return str(found)


def named(text: str, mark: str = "") -> set[str]:
    """Names in the first cell of each row of the tables, those with a mark behind alone."""
    cells = re.findall(r"^\| (`[^|]*)\|", text, re.M)
    found = {name for cell in cells for name in re.findall(rf"`([^`]+)`{mark}", cell)}
    return found - {"--option", "pushed_version"}


def known(parse: Callable[[dict[str, str]], Any], **given: str) -> set[str]:
    """Names that an engine tells when it is given one that it does not know."""
    with pytest.raises(ConfigError) as caught:
        parse({"nonsense": "1", **given})
    return set(str(caught.value).partition("use one of ")[2].split(", "))


def test_options_of_the_command() -> None:
    taken = {f"--{parameter.name}".replace("_", "-") for parameter in push.params}
    there = named(section("What all have in common"))
    assert there == taken - {"--to", "--options", "--as-json", "--index"}


@pytest.mark.parametrize(
    ("title", "options"),
    [
        ("PostgreSQL", postgres),
        ("Qdrant", qdrant),
        ("LanceDB", lance),
        ("Milvus", milvus),
    ],
)
def test_options_that_shape_a_table_are_marked(title: str, options: Any) -> None:
    assert named(section(title), mark=" †") == set(options.SHAPING)


@pytest.mark.parametrize(
    ("title", "options"),
    [("PostgreSQL", postgres), ("Qdrant", qdrant), ("LanceDB", lance), ("Milvus", milvus)],
)
def test_defaults_of_options_that_shape_a_table(title: str, options: Any) -> None:
    """A row may have several options, and then as many defaults."""
    rows = re.findall(r"^\| (`[^|]*)\| ([^|]*)\|", section(title), re.M)
    told = dict[str, str]()
    for names, defaults in rows:
        pairs = zip(re.findall(r"`([^`]+)`", names), defaults.split(","), strict=False)
        told |= {name: default.strip(" `") for name, default in pairs}
    assert {name: told[name] for name in options.DEFAULTS} == dict(options.DEFAULTS)


def test_options_of_databases() -> None:
    assert named(section("PostgreSQL")) == known(postgres.PostgresOptions.parse)
    assert named(section("Qdrant")) == known(qdrant.Options.parse)
    assert named(section("Milvus")) == known(milvus.IndexOptions.parse)
    kinds = ("none", "ivf_flat", "ivf_sq", "ivf_pq", "ivf_hnsw_sq")
    every = set[str]().union(*(known(lance.LanceOptions.parse, index=kind) for kind in kinds))
    assert named(section("LanceDB")) == {name.replace("*", "NAME") for name in every}
