"""What the tests of builds share: rows to build from, closed-form whitening, brute-force cosine."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index import BuildConfig, build_index
from whiten_index.artifacts.files import MANIFEST, sha256_file
from whiten_index.artifacts.manifest import write_manifest
from whiten_index.pipeline.build import BuildReport
from whiten_index.versions.published import set_current

Array = NDArray[np.float64]
DIM, ROWS, TOP = 12, 400, 10


def random_rows(
    seed: int = 0, *, rows: int = ROWS, dim: int = DIM, mean: float = 0.0
) -> NDArray[np.float32]:
    """Correlated rows with spreads from 0.5 to 2 around a mean."""
    random = np.random.default_rng(seed)
    mixing = np.linalg.qr(random.standard_normal((dim, dim)))[0]
    rows_ = (random.standard_normal((rows, dim)) * np.linspace(0.5, 2, dim)) @ mixing
    return (rows_ + mean * random.choice([-1, 1], dim)).astype(np.float32)


def column_facts(dim: int, column: str = "e") -> dict[str, Any]:
    """What a store records of a column of embeddings."""
    return {"kind": "column", "column": column, "dim": dim, "query_encoder": None}


def corpus_source(name: str = "c", **changes: Any) -> dict[str, Any]:
    """What a store records of where a corpus is."""
    columns = {"text_columns": [], "embedding_column": "e", "row_filter": None, "limit": None}
    return {"sources": [name], **columns, **changes}


def write_rows(path: Path, embeddings: NDArray[Any], **columns: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns.setdefault("id", np.arange(len(embeddings)))
    pq.write_table(pa.table({**columns, "embedding": list(embeddings)}), path)
    return str(path)


def build(out: Path, *corpus: str, **options: Any) -> BuildReport:
    options = {
        "embedding_column": "embedding", "id_column": "id", "k": 6, "whiten": "whitening",
        **options,
    }  # fmt: skip
    return build_index(BuildConfig(corpus=corpus, out=str(out), **options))


def build_texts(out: Path, corpus: Path | str, model: Path | str, **options: Any) -> BuildReport:
    """Index the column ``text`` of a corpus by a model."""
    given = {"text_columns": ("text",), "k": 8, "whiten": "whitening", "device": "cpu", **options}
    return build_index(BuildConfig(corpus=(str(corpus),), out=str(out), model=str(model), **given))


def build_of(table: pa.Table, folder: Path, **options: Any) -> Path:
    """Write a corpus, with embeddings in ``e``, into a folder; return the index beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus, out = str(folder / "c.parquet"), folder / "o"
    pq.write_table(table, corpus)
    options = {"embedding_column": "e", "id_column": "id", "out": str(out), **options}
    return build_index(BuildConfig(corpus=(corpus,), **options)).out


def put_lists_on_disk(out: Path) -> None:
    """Do what a build within a memory budget does, which no small index needs."""
    (folder,) = out.glob("versions/*")
    index = faiss.read_index(str(folder / "index.faiss"))
    inner = faiss.extract_index_ivf(index)
    lists = faiss.OnDiskInvertedLists(inner.nlist, inner.code_size, str(folder / "index.ivfdata"))
    lists.merge_from_1(inner.invlists)
    inner.replace_invlists(lists)
    faiss.write_index(index, str(folder / "index.faiss"))
    fields = json.loads((folder / MANIFEST).read_text())
    for name in ("index.faiss", "index.ivfdata"):
        path = folder / name
        fields["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    write_manifest(folder / MANIFEST, fields)
    set_current(out, folder.name)


def closed_form(
    rows: NDArray[Any], *, k: int, exponent: float = 1.0, fitted_on: NDArray[Any] | None = None
) -> Array:
    """Return (x − μ) U[:, :k] Λ[:k]^(−γ/2), from numpy's own covariance and eigh."""
    sample = np.asarray(rows if fitted_on is None else fitted_on, dtype=np.float64)
    values, vectors = np.linalg.eigh(np.cov(sample.T))
    values, vectors = values[::-1][:k], vectors[:, ::-1][:, :k]
    return (rows - sample.mean(axis=0)) @ (vectors * values ** (-exponent / 2))


def cosines(queries: Array, documents: Array) -> Array:
    unit = [x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, documents)]
    return np.asarray(unit[0] @ unit[1].T)


def assert_ranked_by(hits: Sequence[Any], expected: Array, *, tolerance: float = 1e-5) -> None:
    """The hits are the best rows by ``expected`` (n,), in order, with those very scores."""
    order = np.argsort(-expected)[: len(hits)]
    assert [hit.row for hit in hits] == order.tolist()
    np.testing.assert_allclose([hit.score for hit in hits], expected[order], atol=tolerance)


def index_file(out: Path) -> str:
    current = json.loads((out / "CURRENT").read_text())["version"]
    return str(out / "versions" / current / "index.faiss")
