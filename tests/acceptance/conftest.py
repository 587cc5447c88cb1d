"""A corpus of real texts, and the indexes made from it that most tests start from.

Nothing here or in the tests of this folder imports a private name: the tests outlive the code.
"""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.acceptance.commands import done
from tests.acceptance.truth import MAX_LENGTH, SciFact, encode
from tests.acceptance.vectors import Place

DOCUMENTS = 200


@pytest.fixture
def place(made: Place) -> Place:
    """What a module's ``made`` has made, put back as it was."""
    return made.put_back()


@pytest.fixture(scope="session")
def scifact(data: Path, tmp_path_factory: pytest.TempPathFactory) -> SciFact:
    """Some documents of SciFact, with the test queries whose relevant documents are among them."""
    source, folder = data / "retrieval" / "scifact", tmp_path_factory.mktemp("scifact")
    qrels = pq.read_table(source / "qrels.parquet").to_pylist()
    test = [row for row in qrels if row["split"] == "test"]
    relevant = list(dict.fromkeys(str(row["doc_id"]) for row in test))[: DOCUMENTS // 2]
    table = pq.read_table(source / "corpus.parquet")
    ids = [str(each) for each in table["id"].to_pylist()]
    wanted = set(relevant)
    others = [each for each in ids if each not in wanted][: DOCUMENTS - len(relevant)]
    chosen = wanted | set(others)
    table = table.filter(pa.array([each in chosen for each in ids]))
    judged = [row for row in test if str(row["doc_id"]) in chosen]
    asked = {str(row["query_id"]) for row in judged}
    queries = pq.read_table(source / "queries.parquet")
    keep = pa.array([str(each) in asked for each in queries["id"].to_pylist()])
    found = SciFact(folder)
    # Two files, so that one of them can change, go or come.
    found.corpus.mkdir()
    half = table.num_rows // 2
    pq.write_table(table.slice(0, half), found.corpus / "a.parquet")
    pq.write_table(table.slice(half), found.corpus / "b.parquet")
    pq.write_table(queries.filter(keep), found.queries)
    pq.write_table(
        pa.Table.from_pylist(judged, pq.read_schema(source / "qrels.parquet")), found.qrels
    )
    return found


@pytest.fixture(scope="session")
def embeddings(scifact: SciFact) -> np.ndarray:
    """(n, 384) raw embeddings of the documents by transformers alone, in the corpus' order."""
    return encode(scifact.texts())


@pytest.fixture(scope="session")
def query_embeddings(scifact: SciFact) -> np.ndarray:
    """(q, 384) raw embeddings of the queries by transformers alone."""
    return encode(scifact.query_texts())


@pytest.fixture(scope="session")
def built(scifact: SciFact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of whitened vectors of all directions but few, exact; not to be changed."""
    index = tmp_path_factory.mktemp("built") / "index"
    done(
        "build", scifact.corpus, *scifact.columns, "--keep", "title", "--max-length", MAX_LENGTH,
        "--whiten", "whitening", "--k", 64, "--factory", "Flat", "--out", index,
    )  # fmt: skip
    return index


@pytest.fixture
def index(built: Path, scifact: SciFact, tmp_path: Path) -> Path:
    """A copy of ``built`` with a corpus of its own, for tests that change them."""
    corpus = tmp_path / "corpus"
    shutil.copytree(scifact.corpus, corpus)
    copy = tmp_path / "index"
    shutil.copytree(built, copy)
    return copy


@pytest.fixture
def vectors_corpus(tmp_path: Path, embeddings: np.ndarray, scifact: SciFact) -> Path:
    """A folder with the documents' ids, titles, years and raw embeddings in a column."""
    folder = tmp_path / "vectors"
    folder.mkdir()
    rows = scifact.table()
    table = pa.table(
        {
            "id": rows["id"],
            "title": rows["title"],
            "year": pa.array([1990 + i % 30 for i in range(len(rows))]),
            "embedding": pa.FixedSizeListArray.from_arrays(
                pa.array(embeddings.astype(np.float32).ravel()), embeddings.shape[1]
            ),
        }
    )
    half = len(rows) // 2
    pq.write_table(table.slice(0, half), folder / "a.parquet")
    pq.write_table(table.slice(half), folder / "b.parquet")
    return folder
