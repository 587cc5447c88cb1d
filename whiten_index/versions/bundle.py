"""An opened version of an index: raw embeddings in, rows out, and what is known of the rows."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import reading
from whiten_index.corpus.row_filter import RowFilter
from whiten_index.errors import ArtifactError, ConfigError
from whiten_index.index.exact import Rows, Scores, flat_vectors, use_large_pages
from whiten_index.index.factory import inner_of, lists_of
from whiten_index.index.gpu import DeviceIndex
from whiten_index.index.library import INDEX, load_faiss
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.index.transforms import Transforms
from whiten_index.index.vector_search import (
    Search,
    Selection,
    first_of_each,
    nearest,
    nearest_on_gpu,
    search_documents,
    vectors_of,
)
from whiten_index.paths import shown
from whiten_index.versions.documents import Documents
from whiten_index.versions.published import DOCUMENTS, FULL, WHITENING, Version, mending
from whiten_index.versions.version_manifest import VersionManifest
from whiten_index.whitening.spectrum import real_rows
from whiten_index.whitening.transform import Whitening

if TYPE_CHECKING:
    from whiten_index.search.rerank import Reranker

# Sums of squares of larger numbers are beyond float32, whatever the width.
_LARGEST = 1e15


@dataclass(frozen=True, eq=False)
class Bundle:
    """An opened version of an index."""

    source: Version  # the version and its files
    whitening: Whitening  # the transform, in float64
    index: Any  # FAISS's index, raw d-dim rows in
    transforms: Transforms  # what these go through first
    documents: Documents  # row -> id and kept columns
    # A copy of the index proper on a GPU, which searches all rows by embeddings; None where the
    # CPU does everything.
    placed: DeviceIndex | None = None

    @property
    def folder(self) -> Path:
        """Folder of the version."""
        return self.source.folder

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The version's manifest."""
        return self.source.fields

    @property
    def version(self) -> str:
        """Name of the version."""
        return self.source.name

    @property
    def dim(self) -> int:
        """Width d of the raw embeddings that go in."""
        return self.whitening.dim

    def __len__(self) -> int:
        return int(self.index.ntotal)

    @property
    def grouped(self) -> bool:
        """True if rows are passages, several to a document; hits are then grouped by document."""
        return bool(self.manifest["corpus"]["source"].get("passages"))

    def search(
        self,
        embeddings: NDArray[np.floating],
        top_k: int,
        *,
        row_filter: RowFilter | None = None,
        rescorer: "Reranker | None" = None,
        by_row: bool = False,
    ) -> tuple[Scores, Rows]:
        """Return scores and row numbers of the nearest rows, best first, −1 where none.

        Both are (n, m); m is top_k, or less where fewer rows are there or pass the filter. Where
        rows are passages, these are the best row of each of the nearest documents, or ``by_row``
        all rows. ``embeddings`` (n, d) are raw. Without a rescorer, the scores are the index's.
        """
        queries = self._checked(embeddings)
        copy = None if row_filter is not None else self.placed
        search = self._by_embedding(row_filter, rescorer, copy=copy)
        return self._search(search, queries, top_k, row_filter, by_row=by_row)

    def search_like(
        self,
        row: int,
        top_k: int,
        *,
        row_filter: RowFilter | None = None,
        rescorer: "Reranker | None" = None,
    ) -> tuple[Scores, Rows]:
        """Return scores and row numbers nearest to the document at ``row``, itself left out.

        Both are (1, m), m <= top_k. Where rows are passages, ``row`` is the document's first, and
        a document counts by the best score between one of its passages and one of that document.
        """
        own = self.documents.passages_from(row) if self.grouped else range(row, row + 1)
        if rescorer is not None:
            search = self._by_embedding(row_filter, rescorer)
            queries = self._checked(rescorer.embeddings(np.arange(own.start, own.stop)))
        else:
            search, queries = self._by_vector(row_filter), vectors_of(self._inner, own)
        # One more, since the document finds itself; then the best of any of its passages.
        found = self._search(search, queries, top_k, row_filter, spare=1)
        scores, rows = found[0].ravel(), found[1].ravel()
        others = np.flatnonzero((rows >= 0) & ((rows < own.start) | (rows >= own.stop)))
        order = others[np.argsort(-scores[others], kind="stable")]
        first = order[first_of_each(rows[order], self._document_of)][:top_k]
        return scores[None, first], rows[None, first]

    def _search(
        self,
        search: Search,
        queries: NDArray[np.float32],
        top_k: int,
        row_filter: RowFilter | None,
        *,
        spare: int = 0,
        by_row: bool = False,
    ) -> tuple[Scores, Rows]:
        """Return the nearest rows, or the best row of each document, ``spare`` more than top_k."""
        if isinstance(top_k, bool) or not isinstance(top_k, int | np.integer) or top_k < 1:
            raise ConfigError(f"--top-k takes a whole number from 1; {shown(top_k)} was given")
        selection = self._selection(row_filter)
        rows = len(self) if selection is None else selection.count
        wanted = min(top_k + spare, rows)
        if not wanted or by_row or not self.grouped:
            return search(queries, wanted)
        return search_documents(search, self._document_of, queries, top_k=wanted, rows=rows)

    def _by_vector(
        self, row_filter: RowFilter | None, *, copy: DeviceIndex | None = None
    ) -> Search:
        """Return the search of the index proper, or of its copy on a GPU."""
        inner, selection, rows = self._inner, self._selection(row_filter), len(self)

        def search(vectors: NDArray[np.float32], most: int) -> tuple[Scores, Rows]:
            if copy is not None:
                found = nearest_on_gpu(copy, inner, vectors, most)
            else:
                found = nearest(inner, vectors, most, selection)
            # FAISS takes any number as the label of a row.
            if found[1].max(initial=-1) >= rows or found[1].min(initial=-1) < -1:
                raise _unfit(self.source, "its labels are no rows")
            return found

        return search

    def _by_embedding(
        self,
        row_filter: RowFilter | None,
        rescorer: "Reranker | None",
        *,
        copy: DeviceIndex | None = None,
    ) -> Search:
        by_vector = self._by_vector(row_filter, copy=copy)
        if rescorer is None:
            return lambda queries, most: by_vector(self.transforms(queries), most)

        def search(queries: NDArray[np.float32], most: int) -> tuple[Scores, Rows]:
            fetch = min(max(rescorer.candidates, most), len(self)) if most else 0
            _, rows = by_vector(self.transforms(queries), fetch)
            scores = rescorer(queries, rows)
            best = np.lexsort((rows, -scores))[:, :most]
            return np.take_along_axis(scores, best, axis=1), np.take_along_axis(rows, best, axis=1)

        return search

    def _selection(self, row_filter: RowFilter | None) -> Selection | None:
        return None if row_filter is None else self.documents.matching(row_filter)

    @property
    def _inner(self) -> Any:
        return load_faiss().downcast_index(self.index.index)

    def _document_of(self, rows: Rows) -> Rows:
        return self.documents.first_rows(rows) if self.grouped else rows

    def _checked(self, embeddings: NDArray[np.floating]) -> NDArray[np.float32]:
        given = real_rows(embeddings, self.dim, taker="this index")
        with np.errstate(over="ignore"):
            queries = np.ascontiguousarray(given, dtype=np.float32)
        # NaN is not below any bound.
        if not np.abs(queries).max(initial=0.0) <= _LARGEST:
            broken = int(np.argmin((np.abs(queries) <= _LARGEST).all(axis=1)))
            raise ConfigError(
                f"query {broken} holds NaN or infinity, or a number above {_LARGEST:g}, whose "
                "square is beyond float32; mend or drop it"
            )
        return queries


def open_files(version: Version, *, mapped: bool | None = None, device: str = "cpu") -> Bundle:
    """Open a version for search, with all its files checked.

    A flipped bit in a version opened with ``verify="manifest"`` may give other hits or end the
    process, as FAISS and Arrow trust the files that they read. Options are those of ``open_index``;
    lists in a file of their own are mapped by default.
    """
    mapped = IVF_DATA in version if mapped is None else mapped
    bundle = _bundle(version.check(), mapped=mapped)
    version.check_changed()
    index, rows = bundle.index, version.fields["rows"]
    if not index.ntotal == len(bundle.documents) == rows or index.d != bundle.whitening.dim:
        counts = f"it has {index.ntotal:,} rows, {DOCUMENTS} {len(bundle.documents):,}"
        raise _unfit(version, f"{counts}, and its manifest says {rows:,}")
    # FAISS counts them with a sign.
    if not 1 <= getattr(lists_of(index), "nprobe", 1) < 1 << 31:
        raise _unfit(version, "its searches would look into none of its lists")
    return replace(bundle, placed=_placed(bundle, device, mapped=mapped or IVF_DATA in version))


def open_unsealed(folder: Path, fields: Mapping[str, Any], *, mapped: bool = True) -> Bundle:
    """Open a version that is still being made: its files are there, its manifest is not yet.

    Nothing is checked, and the index file is mapped by default.
    """
    return _bundle(Version(folder, cast(VersionManifest, dict(fields)), verify=None), mapped=mapped)


def _bundle(version: Version, *, mapped: bool) -> Bundle:
    index = read_index(version, mapped=mapped)
    if not mapped and (vectors := flat_vectors(inner_of(index))) is not None:
        use_large_pages(vectors)
    whitening = Whitening.load(version.file(WHITENING))
    documents = Documents(version.file(DOCUMENTS), full=version.verify == FULL)
    return Bundle(version, whitening, index, Transforms(index), documents)


def _placed(bundle: Bundle, device: str, *, mapped: bool) -> DeviceIndex | None:
    if mapped and device == "gpu":
        raise ConfigError(
            f"--index-device gpu holds all of {bundle.folder} in memory, and it is read from its "
            "file as it is searched (--mapped, or too large for the memory budget of its build); "
            "use cpu"
        )
    where = "cpu" if mapped and device == "auto" else device
    placed = DeviceIndex.place(bundle._inner, where, to_search=True)
    return None if placed.device == "cpu" else placed


def read_index(version: Version, *, mapped: bool) -> Any:
    """Return the FAISS index of a version."""
    faiss, path = load_faiss(), version.file(INDEX)
    flags = faiss.IO_FLAG_MMAP_IFC if mapped else 0
    # An index from elsewhere may name any file for its lists; this keeps FAISS in the folder.
    flags |= faiss.IO_FLAG_ONDISK_SAME_DIR | faiss.IO_FLAG_READ_ONLY
    on_disk = IVF_DATA in version
    if on_disk:
        version.file(IVF_DATA)
        # FAISS's own flag for lists that were moved prints on standard output.
        flags = faiss.IO_FLAG_SKIP_IVF_DATA | faiss.IO_FLAG_READ_ONLY
    try:
        with reading(path):
            index = faiss.read_index(str(path), flags)
            if not isinstance(index, faiss.IndexPreTransform):
                raise _unfit(version, "it is behind no transforms")
            ivf = lists_of(index)
            lists: Any = None if ivf is None else faiss.downcast_InvertedLists(ivf.invlists)
            if on_disk != isinstance(lists, faiss.OnDiskInvertedLists):
                raise _unfit(version, f"it and {IVF_DATA} do not belong together")
            if on_disk:
                lists.filename = str(version.file(IVF_DATA))
                lists.do_mmap()
    except RuntimeError as error:
        raise _unfit(version, "FAISS cannot read it") from error
    return index


def _unfit(version: Version, why: str) -> ArtifactError:
    path = version.file(INDEX)
    return ArtifactError(f"{path} is damaged: {why}; {mending(version.root)}")
