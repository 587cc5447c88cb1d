"""The examples in the docstrings of the public names run, and print what they say."""

import doctest
import importlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import whiten_index
from tests.helpers.embedding_server import EmbeddingServer
from whiten_index import BuildConfig, PushConfig, build_index, push_index

NAMES = sorted(set(whiten_index.__all__) - {"__version__"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> Path:
    """The files that examples name: a corpus, its store and index, pairs, a pushed file."""
    root = tmp_path_factory.mktemp("examples")
    numbered = ["A cat sat on the mat.", *(f"Line {i}: {texts[i % 36]}" for i in range(59))]
    table = pa.table({"id": [f"d{i}" for i in range(60)], "text": numbered, "title": numbered})
    pq.write_table(table, root / "docs.parquet")
    options = {"text_columns": "text", "id_column": "id", "k": 16, "store": str(root / "store")}
    corpus, out = str(root / "docs.parquet"), str(root / "index")
    build_index(BuildConfig(corpus=corpus, out=out, **options))
    push_index(PushConfig(index=str(root / "index"), to=str(root / "pushed.parquet")))
    pairs = "".join(f"{numbered[i]}\t{numbered[i + 1]}\t{i % 5}\n" for i in range(20))
    (root / "sts.tsv").write_text("sentence1\tsentence2\tscore\n" + pairs)
    asked = [f'{{"_id": "q{i}", "text": "{numbered[i]}"}}\n' for i in range(40)]
    (root / "queries.jsonl").write_text("".join(asked))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(40))
    (root / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + judged)
    return root


@pytest.fixture(scope="module")
def api() -> Iterator[str]:
    with EmbeddingServer(model="text-embedding-3-small") as server:
        yield server.url


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_public_name(
    name: str, folder: Path, api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OPENAI_BASE_URL", api)
    public = getattr(whiten_index, name)
    module = importlib.import_module(public.__module__)
    names = {each: getattr(whiten_index, each) for each in whiten_index.__all__}
    found = doctest.DocTestFinder().find(
        public, name, module, {**vars(module), **names, "np": np, "whiten_index": whiten_index}
    )
    examples = [each for each in found if each.examples]
    assert examples, f"{name} has no example"
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failed = [each.name for each in examples if runner.run(each).failed]
    assert not failed
