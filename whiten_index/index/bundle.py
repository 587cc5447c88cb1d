"""The published folder: versions, each whole or absent, and ``CURRENT`` that names one.

Layout::

    CURRENT                       {"version": …, "manifest_sha256": …}, replaced in one step
    versions/<version>/           manifest.json, whitening.safetensors, moments.safetensors,
                                  index.faiss, documents.arrow
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index import manifest
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.index.documents import Documents
from whiten_index.index.grouping import first_of_each, search_documents
from whiten_index.index.library import load_faiss
from whiten_index.whitening import Whitening

KIND, FORMAT_VERSION = "index", 1
CURRENT, VERSIONS = "CURRENT", "versions"
INDEX, WHITENING = "index.faiss", "whitening.safetensors"
MOMENTS, DOCUMENTS = "moments.safetensors", "documents.arrow"
_VERSION = re.compile(r"(\d{6,})-[0-9a-f]{12}")
VERIFY = ("full", "manifest")


@dataclass(frozen=True, eq=False)
class Bundle:
    """An opened version of an index.

    Attributes:
        folder: of the version.
        manifest: as published.
        whitening: the transform, in float64.
        index: FAISS's index, raw d-dim rows in.
        documents: row -> id and kept columns.
    """

    folder: Path
    manifest: Mapping[str, Any]
    whitening: Whitening
    index: Any
    documents: Documents

    @property
    def version(self) -> str:
        """Name of the version."""
        return self.folder.name

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings that go in."""
        return self.whitening.dim

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def grouped(self) -> bool:
        """Whether rows are passages, several to a document, and hits are grouped by document."""
        return bool(self.manifest["corpus"]["source"].get("passages"))

    def search(
        self, embeddings: NDArray[np.floating], top_k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return cosines and row numbers of the nearest rows, both (n, top_k), −1 where none.

        Where rows are passages, these are the best row of each of the nearest documents.

        Args:
            embeddings: (n, d) raw, not whitened.
            top_k: neighbours a query.

        Raises:
            ConfigError: wrong width, NaN or infinity, or top_k below 1.
        """
        return self._search(self.index, self._checked(embeddings), top_k, spare=0)

    def search_like(self, row: int, top_k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return cosines and row numbers nearest to the document at ``row``, itself left out.

        Both are (1, m), m <= top_k. Where rows are passages, ``row`` is the document's first, and
        a document counts by the best cosine between a passage of its own and one of that document.

        Raises:
            ConfigError: this kind of index gives no vectors back, or top_k is below 1.
        """
        inner = load_faiss().downcast_index(self.index.index)
        own = self.documents.passages_from(row) if self.grouped else range(row, row + 1)
        # One more, since the document finds itself; then the best of any of its passages.
        found = self._search(inner, _vectors_of(inner, own), top_k, spare=1)
        scores, rows = found[0].ravel(), found[1].ravel()
        others = np.flatnonzero((rows >= 0) & ((rows < own.start) | (rows >= own.stop)))
        order = others[np.argsort(-scores[others], kind="stable")]
        first = order[first_of_each(rows[order], self._document_of)][:top_k]
        return scores[None, first], rows[None, first]

    def _search(
        self, index: Any, queries: NDArray[np.float32], top_k: int, *, spare: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return the nearest rows, or the best row of each document, ``spare`` more than top_k."""
        wanted = _checked_top_k(top_k, len(self) - spare) + spare

        def search(
            some: NDArray[np.float32], most: int
        ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
            scores, rows = index.search(some, most, params=self._parameters(most))
            return scores, rows

        if not self.grouped:
            return search(queries, wanted)
        return search_documents(search, self._document_of, queries, top_k=wanted, rows=len(self))

    def _parameters(self, rows: int) -> Any:
        """Return what FAISS needs to be told to give as many rows as are asked for."""
        faiss = load_faiss()
        inner = faiss.downcast_index(self.index.index)
        if not isinstance(inner, faiss.IndexHNSW):
            return None
        # HNSW stops after efSearch candidates, and gives no more rows than it has seen.
        parameters = faiss.SearchParametersHNSW()
        parameters.efSearch = max(inner.hnsw.efSearch, rows)
        return parameters

    def _document_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.documents.first_rows(rows) if self.grouped else rows

    def _checked(self, embeddings: NDArray[np.floating]) -> NDArray[np.float32]:
        with np.errstate(over="ignore"):
            queries = np.ascontiguousarray(embeddings, dtype=np.float32)
        if queries.ndim != 2 or queries.shape[1] != self.dim:
            raise ConfigError(
                f"this index takes (n, {self.dim}) raw embeddings; these have shape {queries.shape}"
            )
        if not np.isfinite(queries).all():
            broken = int(np.argmin(np.isfinite(queries).all(axis=1)))
            raise ConfigError(f"query {broken} holds NaN or infinity (in float32); mend or drop it")
        return queries


def _checked_top_k(top_k: int, rows: int) -> int:
    if top_k < 1:
        raise ConfigError(f"--top-k takes a positive number; {top_k} was given")
    return max(min(top_k, rows), 1)


def tidy(root: Path) -> None:
    """Remove what a build that died left in the index folder."""
    with manifest.writing(root):
        manifest.remove_leftovers(root)
        manifest.remove_leftovers(root / VERSIONS)


def find_version(root: Path, identity: str) -> str | None:
    """Return a whole version made of the same inputs and choices, if there is one."""
    for folder in sorted((root / VERSIONS).glob("[0-9]*"), reverse=True):
        try:
            fields = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
            if fields.get("identity") == identity:
                manifest.check_files(folder, fields, content=True)
                return folder.name
        except ArtifactError:
            continue
    return None


def next_version(root: Path, identity: str) -> str:
    """Return a name for a new version: one number up, then the identity's first digits."""
    names = (_VERSION.fullmatch(path.name) for path in (root / VERSIONS).glob("*"))
    numbers = [int(name[1]) for name in names if name]
    return f"{max(numbers, default=0) + 1:06d}-{identity[:12]}"


def publish(root: Path, version: str, fill: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
    """Write a version's folder, whole or not at all; ``set_current`` makes it the one read."""
    return manifest.publish_folder(root / VERSIONS / version, fill)


def set_current(root: Path, version: str) -> None:
    """Make ``version`` the one that readers open, in one step."""
    digest = manifest.sha256_file(root / VERSIONS / version / manifest.MANIFEST)
    with manifest.writing(root / CURRENT):
        manifest.write_json(root / CURRENT, {"version": version, "manifest_sha256": digest})


def write_index(index: Any, path: Path) -> None:
    """Write a FAISS index; unlike FAISS's own writer, notice a disk that fills up."""
    faiss = load_faiss()
    with path.open("wb") as file:

        def write(data: bytes) -> int:
            return file.write(data)

        faiss.write_index(index, faiss.PyCallbackIOWriter(write))
        file.flush()
        os.fsync(file.fileno())


def read_fields(root: Path, *, verify: str = "full") -> tuple[Path, dict[str, Any]]:
    """Return the published version's folder and manifest, checked before anyone uses them.

    Args:
        root: the index folder.
        verify: ``full`` checks every file's SHA-256, ``manifest`` its size and the manifest.

    Raises:
        ArtifactError: nothing is published there, or it is damaged.
    """
    if verify not in VERIFY:
        raise ConfigError(f"verify {verify!r} is unknown; use {', '.join(VERIFY)}")
    current = _read_current(root)
    folder = root / VERSIONS / str(current["version"])
    fields = manifest.read_manifest(folder, kind=KIND, version=FORMAT_VERSION)
    if manifest.sha256_file(folder / manifest.MANIFEST) != current["manifest_sha256"]:
        raise ArtifactError(
            f"{folder / manifest.MANIFEST} is damaged: it does not match {CURRENT}; restore it "
            "from a copy, or run the build again"
        )
    manifest.check_files(folder, fields, content=verify == "full")
    return folder, fields


def open_bundle(root: Path | str, *, verify: str = "full") -> Bundle:
    """Open the published version of an index.

    Args:
        root: the index folder.
        verify: see ``read_fields``.

    Raises:
        ArtifactError: nothing is published there, or it is damaged.
    """
    folder, fields = read_fields(Path(root), verify=verify)
    faiss = load_faiss()
    try:
        index = faiss.read_index(str(folder / INDEX))
    except RuntimeError as error:
        raise ArtifactError(
            f"FAISS cannot read {folder / INDEX}; restore it from a copy, or build again"
        ) from error
    whitening = Whitening.load(folder / WHITENING)
    documents = Documents(folder / DOCUMENTS)
    if index.ntotal != len(documents) or index.d != whitening.dim:
        raise ArtifactError(
            f"{folder} does not fit together: {index.ntotal} vectors, {len(documents)} documents; "
            "restore it from a copy, or build again"
        )
    return Bundle(folder, fields, whitening, index, documents)


def vector_bytes(index: Any, *, file_bytes: int) -> int:
    """Return the bytes of the reduced vectors: rows times code size.

    Where the kind of index has no fixed code size, it is ``file_bytes``, those of the whole file.
    """
    faiss = load_faiss()
    inner = faiss.downcast_index(index.index)
    holder = faiss.downcast_index(inner.storage) if hasattr(inner, "storage") else inner
    size = getattr(holder, "code_size", None)
    return int(index.ntotal) * int(size) if size else file_bytes


def _vectors_of(inner: Any, rows: range) -> NDArray[np.float32]:
    """Return the vectors of n rows as the index keeps them, (n, k).

    Raises:
        ConfigError: this kind of index gives no vectors back.
    """
    faiss = load_faiss()
    if isinstance(inner, faiss.IndexRefine):
        inner = faiss.downcast_index(inner.refine_index)
    lists = (faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
    # Others are not asked: some of FAISS's fast-scan indexes crash on it.
    if not isinstance(inner, (faiss.IndexFlatCodes, faiss.IndexHNSW, *lists)):
        raise ConfigError(
            f"an index of kind {type(inner).__name__} gives no vectors back, so it has no "
            "neighbours of a document; search by text, or build with another --factory"
        )
    if isinstance(inner, lists):
        inner.make_direct_map()
    return np.stack([inner.reconstruct(row) for row in rows])


def _read_current(root: Path) -> dict[str, Any]:
    if not root.exists():
        raise ArtifactError(f"{root} does not exist; check the path, or build an index there")
    current = manifest.read_json(root / CURRENT, what="a published index")
    if not {"version", "manifest_sha256"} <= set(current):
        raise ArtifactError(f"{root / CURRENT} is damaged; run the build again")
    return current
