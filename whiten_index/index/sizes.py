"""Bytes of an index by their use, counted on a filled one or computed before it is made.

Bytes that grow with the rows (codes, ids, lists, graph) are kept apart from those that do not
(matrix, codebooks, centroids), so that figures of one corpus apply to another.
"""

from dataclasses import dataclass, replace
from typing import Any

from whiten_index.index.factory import inner_index
from whiten_index.index.library import load_faiss

_ID, _FLOAT, _SIZE = 8, 4, 8
_ON_DISK_LIST = 3 * _SIZE
# Each row of a graph has its level and where its neighbours start.
_GRAPH_A_ROW = 4 + 8


@dataclass(frozen=True, kw_only=True)
class IndexBytes:
    """Bytes of a whole index, in its file and in memory once it is opened."""

    codes: int = 0  # of the vectors, in any codec
    ids: int = 0  # row numbers in inverted lists
    lists: int = 0  # lengths of inverted lists and the padding of their blocks
    graph: int = 0  # neighbours of every row
    matrix: int = 0  # transforms from d to k dims
    codebooks: int = 0  # of the codec
    centroids: int = 0  # of the lists, with the graph over them if there is one

    @property
    def per_row_total(self) -> int:
        """Bytes that grow with the rows."""
        return self.codes + self.ids + self.lists + self.graph

    @property
    def fixed(self) -> int:
        """Bytes that do not grow with the rows."""
        return self.matrix + self.codebooks + self.centroids

    @property
    def total(self) -> int:
        """All bytes."""
        return self.per_row_total + self.fixed

    def to_json(self) -> dict[str, int]:
        """Return the split and the total as JSON values."""
        return {**vars(self), "total": self.total}


def expected_bytes(factory: str, *, rows: int, dim: int, k: int) -> IndexBytes:
    """Return the bytes of an index of ``rows`` rows, by the structure of the empty one."""
    # Centring, and the matrix.
    inner = measured_bytes(inner_index(factory, k), rows=rows)
    return replace(inner, matrix=_FLOAT * (dim + dim * k))


def measured_bytes(index: Any, *, rows: int | None = None) -> IndexBytes:
    """Return the bytes of an index as it is, or with ``rows`` rows in it.

    It may have the transforms before it.
    """
    faiss = load_faiss()
    # The holder keeps the object alive: FAISS frees it with its last Python name.
    holder, index = index, faiss.downcast_index(index)
    assert holder is not None
    if isinstance(index, faiss.IndexPreTransform):
        inner = measured_bytes(index.index, rows=rows)
        return replace(inner, matrix=inner.matrix + _transform_bytes(index))
    held = int(index.ntotal) if rows is None else rows
    if isinstance(index, faiss.IndexIVF):
        return _list_bytes(index, held, filled=rows is None)
    if isinstance(index, faiss.IndexHNSW):
        graph = _graph_bytes(index, held, filled=rows is None)
        return replace(measured_bytes(index.storage, rows=rows), graph=graph)
    if isinstance(index, faiss.IndexFastScan):
        # Codes come in blocks, and the last one is filled up.
        held = -(-held // index.bbs) * index.bbs
    size = getattr(index, "code_size", None)
    if size is None:
        # Of no codes, such as additive centroids: as much as its file.
        return IndexBytes(codes=len(faiss.serialize_index(index)))
    return IndexBytes(codes=held * int(size), codebooks=_codebook_bytes(index))


def _list_bytes(index: Any, rows: int, *, filled: bool) -> IndexBytes:
    faiss = load_faiss()
    nlist, size = int(index.nlist), int(index.code_size)
    lists = _SIZE * nlist
    found = faiss.downcast_InvertedLists(index.invlists)
    if isinstance(found, faiss.BlockInvertedLists):
        lists += _SIZE * nlist
        if filled:
            blocks = sum(-(-found.list_size(n) // found.n_per_block) for n in range(nlist))
            lists += blocks * int(found.block_size) - rows * size
        else:
            # The last block of a list is half full in the mean.
            lists += nlist * int(found.block_size) // 2
    elif isinstance(found, faiss.OnDiskInvertedLists):
        lists = _ON_DISK_LIST * nlist + int(found.totsize) - rows * (size + _ID)
    quantizer = measured_bytes(index.quantizer, rows=nlist)
    return IndexBytes(
        codes=rows * size,
        ids=rows * _ID,
        lists=lists,
        codebooks=_codebook_bytes(index),
        centroids=quantizer.total,
    )


def _graph_bytes(index: Any, rows: int, *, filled: bool) -> int:
    graph = index.hnsw
    if filled:
        return int(graph.neighbors.size()) * _FLOAT + rows * _GRAPH_A_ROW
    # Each level holds 1/M of the rows of the one below, the lowest has twice the neighbours.
    lowest, above = int(graph.nb_neighbors(0)), int(graph.nb_neighbors(1))
    neighbours = lowest + above / max(above - 1, 1)
    return int(rows * (neighbours * _FLOAT + _GRAPH_A_ROW))


def _codebook_bytes(index: Any) -> int:
    """Return the bytes that a codec has learned, or will have."""
    size = 0
    if hasattr(index, "pq"):
        size += int(index.pq.M) * int(index.pq.ksub) * int(index.pq.dsub) * _FLOAT
    sq = load_faiss().ScalarQuantizer
    if hasattr(index, "sq") and index.sq.qtype in (sq.QT_8bit, sq.QT_6bit, sq.QT_4bit):
        # A least and a width a dimension.
        size += 2 * int(index.d) * _FLOAT
    if hasattr(index, "aq"):
        size += int(index.aq.total_codebook_size) * int(index.d) * _FLOAT
    if hasattr(index, "rabitq") and not hasattr(index, "nlist"):
        # The centre; lists have their own.
        size += int(index.d) * _FLOAT
    return size


def _transform_bytes(index: Any) -> int:
    faiss = load_faiss()
    size = 0
    for number in range(index.chain.size()):
        step = faiss.downcast_VectorTransform(index.chain.at(number))
        # FAISS keeps all eigenvectors of a PCA next to those it multiplies with.
        for name in ("A", "b", "mean", "PCAMat", "eigenvalues"):
            values = getattr(step, name, None)
            size += 0 if values is None else int(values.size()) * _FLOAT
    return size
